// Twin of fused_qknorm_rope_cache.cu: each head is read once for its norm, and again, from the cache, to be normed.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cache/writes/fused_qknorm_rope_cache.h"
#include "cpu/pairs.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

// weight + bias in fp32, as in memory.
std::vector<float> biased(const void* weight, DType dtype, int64_t n, float bias) {
  std::vector<float> result(n);
  dispatch<float, f16, bf16>(dtype, [&]<class W>() {
    for (int64_t i = 0; i < n; ++i) result[i] = to_float(static_cast<const W*>(weight)[i]) + bias;
  });
  return result;
}

template <class T>
void norm_head(T* out, const T* head, const float* weights, int64_t n, float epsilon) {
  const auto add_squares = [=](Pair<T> sum, int64_t i, int64_t count) {
    const Pair<T> v = load_pair<T>(head + i, count);
    return sum + v * v;
  };
  const float squares = sum(fold_pairs(0, n, Pair<T>(0.0f), add_squares));
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
  each_pair(0, n, [=](int64_t i, int64_t count) {
    store_pair(out + i, load_pair<T>(head + i, count) * inverse * load_pair<T>(weights + i, count), count);
  });
}

}  // namespace

void norm_heads_cpu(const NormHeadsArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 16384;
  const int64_t n = args.head_dim, heads = args.num_heads();
  const float epsilon = plain(args.epsilon), bias = plain(args.weight_bias);
  const std::vector<float> q_weights = biased(args.q_weight, args.weight_dtype, n, bias),
                           k_weights = biased(args.k_weight, args.weight_dtype, n, bias);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_tokens, kElementsWorthAThread / (heads * n) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* head = static_cast<const T*>(args.qkv) + t * args.qkv_token;
        for (int64_t h = 0; h < heads; ++h, head += n) {
          T* const out = args.template out_of<T>(t, h);
          if (const void* weight = args.weight_of(h)) {
            norm_head(out, head, weight == args.q_weight ? q_weights.data() : k_weights.data(), n, epsilon);
          } else {
            std::copy_n(head, n, out);
          }
        }
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
