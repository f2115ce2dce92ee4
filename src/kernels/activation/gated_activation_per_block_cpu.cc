// out = quantise(y / s),  y = silu(gate) * up in fp32,  s = clamp(max |y| / 448 or 127) for each block of a row.
//
// A block is one thread's, which keeps y beside itself until the scale is known; blocks that come next are prefetched.  Silu
// and the codes bound it: 32 cycles of Zen 5 for 32 elements in bf16 with AVX-512 (int8: 26), whose 160 bytes one of two
// cores that copy together moves in 17 to 31.
#include <algorithm>
#include <vector>

#include "activation/activations_cpu.h"
#include "activation/gated_activation_per_block.h"
#include "cpu/parallel.h"
#include "cpu/quantise.h"

namespace pykv::PYKV_ISA {
namespace {

// Fills y, padded to whole pairs, and gives the largest of all |y|, in which NaN does not count.
template <class T>
float multiply(float* y, const T* gate, const T* up, int64_t n, int64_t ahead) {
  return max(fold_pairs(0, n, Pair<T>(0.0f), [=](Pair<T> largest, int64_t i, int64_t count) {
    prefetch_pair(gate + i + ahead);
    prefetch_pair(up + i + ahead);
    const Pair<T> product = silu(load_pair<T>(gate + i, count)) * load_pair<T>(up + i, count);
    store(y + i, product.x);
    store(y + i + kWidth, product.y);
    return max(abs(product), largest);
  }));
}

// Of some neighbouring blocks of a row first all products, then all scales, then all codes: what one waits for is worked out
// while others are.
template <class T, class Code>
class Blocks {
 public:
  Blocks(const GatedActivationPerBlockArgs& args, bool streamed)
      : args_(args),
        padded_((args.group_size + kPair - 1) / kPair * kPair),
        products_(kAtOnce * padded_),
        codes_(kAtOnce * args.group_size),
        writer_(streamed) {}

  // [begin, end) of all rows' blocks.
  void operator()(int64_t begin, int64_t end) {
    const int64_t groups = args_.width / args_.group_size;
    while (begin < end) {
      const int64_t group = begin % groups, count = std::min({kAtOnce, groups - group, end - begin});
      write(begin / groups, group, count);
      begin += count;
    }
  }

 private:
  static constexpr int64_t kAtOnce = 8;

  void write(int64_t row, int64_t group, int64_t count) {
    const int64_t n = args_.group_size;
    const T* gate = static_cast<const T*>(args_.input) + args_.input_rows.offset(row) + group * n;
    float* scales = args_.scales + row * args_.scales_row + group * args_.scales_group;
    float largest[kAtOnce];
    for (int64_t g = 0; g < count; ++g)
      largest[g] = multiply(products_.data() + g * padded_, gate + g * n, gate + args_.width + g * n, n, kAtOnce * n);
    for (int64_t g = 0; g < count; ++g)
      scales[g * args_.scales_group] =
          std::max(std::min(largest[g] / args_.largest(), float{args_.most}), args_.least());
    for (int64_t g = 0; g < count; ++g) {
      each_pair(0, n,
                [=, by = Divisor(scales[g * args_.scales_group], largest[g]), to = codes_.data() + g * n,
                 from = products_.data() + g * padded_](int64_t i, int64_t count) {
                  store_quantised(to + i, Pair<T>{load(from + i), load(from + i + kWidth)} / by, count);
                });
    }
    Code* out = static_cast<Code*>(args_.out) + args_.out_rows.offset(row) + group * n;
    writer_.put(out, codes_.data(), count * n);
  }

  const GatedActivationPerBlockArgs& args_;
  const int64_t padded_;
  std::vector<float> products_;
  std::vector<Code> codes_;
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
