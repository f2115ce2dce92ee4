// Twin of expert_gemm.cu: x of some pairs as floats, then rows of the weight, each of which is read once for them.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "gemm/tile_map_cpu.h"
#include "moe/expert_gemm.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kChunk = 64;  // pairs
constexpr int kRows = 2;        // of the weight, at once

// Sums of kTokens rows of x times kRows_ rows of the weight.
template <class T, int kRows_, int kTokens>
[[gnu::always_inline]] inline void dot(const T* w, int64_t w_stride, const float* x, int64_t x_stride, int64_t k,
                                       float (&sums)[kRows_][kTokens]) {
  Floats total[kRows_][kTokens] = {};
  for (int64_t i = 0; i < k; i += kWidth) {
    Floats rows[kRows_];
    for (int r = 0; r < kRows_; ++r)
      rows[r] = i + kWidth <= k ? load(w + r * w_stride + i) : load(w + r * w_stride + i, k - i);
    for (int t = 0; t < kTokens; ++t) {
      const Floats own = load(x + t * x_stride + i);
      for (int r = 0; r < kRows_; ++r) total[r][t] += rows[r] * own;
    }
  }
  for (int r = 0; r < kRows_; ++r)
    for (int t = 0; t < kTokens; ++t) sums[r][t] = reduce(total[r][t], [](auto a, auto b) { return a + b; });
}

template <class T>
class Product {
 public:
  Product(const ExpertGemmArgs& a, int32_t weight, const int32_t* pairs)
      : a_(a),
        w_(static_cast<const T*>(a.weights) + weight * a.weight_stride),
        bias_(a.bias ? static_cast<const T*>(a.bias) + weight * a.map.bias_stride : nullptr),
        pairs_(pairs),
        padded_k_((a.k + kWidth - 1) / kWidth * kWidth) {}

  void run(int64_t first, int64_t count, std::vector<float>& x) const {
    x.resize(static_cast<size_t>(count * padded_k_));
    parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* const from = static_cast<const T*>(a_.x) + pairs_[first + t] / a_.map.top_k * a_.x_stride;
        float* const to = x.data() + t * padded_k_;
        for (int64_t i = 0; i < a_.k; i += kWidth) {
          const Floats v = load(from + i, a_.k - i);
          __builtin_memcpy(to + i, &v, sizeof(v));
        }
      }
    });
    parallel_for((a_.n + kRows - 1) / kRows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * kRows; row < std::min(end * kRows, a_.n); row += kRows) {
        if (row + kRows <= a_.n) {
          rows<kRows>(row, first, count, x.data());
        } else {
          rows<1>(row, first, count, x.data());
        }
      }
    });
  }

 private:
  template <int kRows_>
  void rows(int64_t row, int64_t first, int64_t count, const float* x) const {
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) tokens<kRows_, 4>(row, first + t, x + t * padded_k_);
    for (; t < count; ++t) tokens<kRows_, 1>(row, first + t, x + t * padded_k_);
  }

  template <int kRows_, int kTokens>
  void tokens(int64_t row, int64_t first, const float* x) const {
    float sums[kRows_][kTokens];
    dot<T, kRows_, kTokens>(w_ + row * a_.weight_row_stride, a_.weight_row_stride, x, padded_k_, a_.k, sums);
    for (int t = 0; t < kTokens; ++t) {
      const int64_t to = pairs_[first + t];
      const float last = a_.map.factor_of(to);
      for (int r = 0; r < kRows_; ++r) {
        const float bias = bias_ ? to_float(bias_[row + r]) : 0.0f;
        static_cast<T*>(a_.out)[to * a_.out_stride + row + r] = from_float<T>((sums[r][t] + bias) * last);
      }
    }
  }

  const ExpertGemmArgs& a_;
  const T *w_, *bias_;
  const int32_t* pairs_;
  int64_t padded_k_;
};

}  // namespace

void expert_gemm_cpu(const ExpertGemmArgs& args, const Launch&) {
  std::vector<float> x;
  dispatch<f16, bf16>(args.dtype, [&]<class T>() {
    for_each_weight(args.map, args.num_rows, [&](int32_t weight, const int32_t* pairs, int64_t count) {
      const Product<T> product(args, weight, pairs);
      for (int64_t first = 0; first < count; first += kChunk) product.run(first, std::min(kChunk, count - first), x);
    });
  });
}

}  // namespace pykv::PYKV_ISA
