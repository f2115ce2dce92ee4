// out = quantise(y * (1 / s)),  y = R_T(R_T(silu(gate)) * up),  s = clamp(max |y| / 448 or 127) for each block of a row.
//
// A block is one thread's, which keeps y beside itself until the scale is known; blocks that come next are prefetched.  Silu
// and the codes bound it: 30 cycles of Zen 5 for 32 elements in bf16 with AVX-512 (int8: 24), whose 160 bytes one of two
// cores that copy together moves in 17 to 31.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "activation/activations_cpu.h"
#include "activation/gated_activation_per_block.h"
#include "core/codes.h"
#include "cpu/largest.h"
#include "cpu/parallel.h"
#include "cpu/quantise.h"

namespace pykv::PYKV_ISA {
namespace {

// Fills y, padded to whole pairs.
template <class T>
Words multiply(float* y, const T* gate, const T* up, int64_t n, int64_t ahead) {
  const auto next = [=](LargestFloat<T> largest, int64_t i, int64_t count) {
    prefetch_pair(gate + i + ahead);
    prefetch_pair(up + i + ahead);
    const Pair<T> factor = load_pair<T>(up + i, count) + 0.0f;  // -0 counts as 0
    const Pair<T> product = rounded(rounded(exact_silu(load_pair<T>(gate + i, count))) * factor);
    store(y + i, product.x);
    store(y + i + kWidth, product.y);
    largest.take(product);
    return largest;
  };
  return fold_pairs(0, n, LargestFloat<T>(), next).lanes();
}

// Codes of such numbers times a factor.  kInside: none is NaN, nor are there larger ones than the scale was made for.
template <class T, bool kInside, class Code>
void encode(Code* to, const float* from, int64_t n, float factor) {
  using Inside = std::conditional_t<std::is_same_v<Code, int8_t>, InsideInt8, InsideE4M3>;
  using Result = std::conditional_t<kInside, Inside, Code>;
  each_pair(0, n, [=](int64_t i, int64_t count) {
    store_quantised(reinterpret_cast<Result*>(to) + i, Pair<T>{load(from + i), load(from + i + kWidth)} * factor,
                    count);
  });
}

// Of some neighbouring blocks of a row first all products, then all scales, then all codes: what one waits for is worked out
// while others are.
template <class T, class Code>
class Blocks {
 public:
  Blocks(const GatedActivationPerBlockArgs& args, bool streamed)
      : args_(args),
        padded_((args.group_size + kPair - 1) / kPair * kPair),
        at_once_(std::clamp<int64_t>(kElementsAtOnce / padded_, 1, kWidth)),
        most_(args.most),
        products_(at_once_ * padded_ * sizeof(float) / sizeof(Line) + 1),
        codes_(at_once_ * padded_ * sizeof(Code) / sizeof(Line) + 1),
        writer_(streamed) {}

  // [begin, end) of all rows' blocks.
  void operator()(int64_t begin, int64_t end) {
    const int64_t groups = args_.width / args_.group_size;
    while (begin < end) {
      const int64_t group = begin % groups, count = std::min({at_once_, groups - group, end - begin});
      write(begin / groups, group, count);
      begin += count;
    }
  }

 private:
  static constexpr int64_t kElementsAtOnce = 4096;  // whose floats leave room in L1

  void write(int64_t row, int64_t group, int64_t count) {
    const int64_t n = args_.group_size;
    const T* gate = static_cast<const T*>(args_.input) + args_.input_rows.offset(row) + group * n;
    float* scales = args_.scales + row * args_.scales_row + group * args_.scales_group;
    float* const products = reinterpret_cast<float*>(products_.data());
    Words lanes[kWidth] = {};
    for (int64_t g = 0; g < count; ++g)
      lanes[g] = multiply(products + g * padded_, gate + g * n, gate + args_.width + g * n, n, at_once_ * n);
    float largest[kWidth], exact[kWidth], scale[kWidth];
    store(largest, __builtin_bit_cast(Floats, largest_lanes(lanes)));
    for (int64_t g = 0; g < kWidth; ++g) {
      exact[g] = largest[g] / args_.largest();
      scale[g] = std::max(std::min(exact[g], most_), args_.least());
    }
    Code* const codes = reinterpret_cast<Code*>(codes_.data());
    for (int64_t g = 0; g < count; ++g) {
      const float* const from = products + g * padded_;
      if (scale[g] == exact[g] && largest[g] < 0x1p80f) {
        encode<T, true>(codes + g * n, from, n, factor_of(scale[g]));
      } else {
        scale[g] = encode_any(codes + g * n, from, largest[g]);
      }
    }
    for (int64_t g = 0; g < count; ++g) scales[g * args_.scales_group] = scale[g];
    Code* out = static_cast<Code*>(args_.out) + args_.out_rows.offset(row) + group * n;
    writer_.put(out, codes, count * n);
  }

  // A block whose numbers may be NaN, infinite or too large for its scale, which it gives.
  [[gnu::noinline]] float encode_any(Code* to, const float* from, float largest) {
    if (std::isnan(largest)) largest = largest_number(from, padded_);
    const float scale = std::max(std::min(largest / args_.largest(), most_), args_.least());
    encode<T, false>(to, from, args_.group_size, factor_of(scale));
    return scale;
  }

  const GatedActivationPerBlockArgs& args_;
  const int64_t padded_, at_once_;
  const float most_;
  std::vector<Line> products_, codes_;
  LineWriter writer_;
};

template <class T, class Code>
void run(const GatedActivationPerBlockArgs& args) {
  constexpr int64_t kElementsWorthAThread = 8192;
  const int64_t blocks = args.num_rows * (args.width / args.group_size);
  const bool streamed = args.num_rows * args.width > kWorthStreaming;
  parallel_for(blocks, std::max<int64_t>(1, kElementsWorthAThread / args.group_size),
               [&](int64_t begin, int64_t end) { Blocks<T, Code>(args, streamed)(begin, end); });
}

}  // namespace

void gated_activation_per_block_cpu(const GatedActivationPerBlockArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (args.out_dtype == DType::kInt8) {
      run<T, int8_t>(args);
    } else {
      run<T, e4m3>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
