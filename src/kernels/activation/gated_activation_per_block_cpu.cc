// out = quantise(y / s),  y = silu(gate) * up in fp32,  s = clamp(max |y| / 448 or 127) for each block of a row.
//
// A block is one thread's, which keeps y beside itself until the scale is known.
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
float multiply(float* y, const T* gate, const T* up, int64_t n) {
  return max(fold_pairs(0, n, Pair<T>(0.0f), [=](Pair<T> largest, int64_t i, int64_t count) {
    const Pair<T> product = silu(load_pair<T>(gate + i, count)) * load_pair<T>(up + i, count);
    store(y + i, product.x);
    store(y + i + kWidth, product.y);
    return max(abs(product), largest);
  }));
}

template <class T, class Code>
void run(const GatedActivationPerBlockArgs& args) {
  constexpr int64_t kElementsWorthAThread = 8192;
  const int64_t n = args.group_size, groups = args.width / n;
  parallel_for(args.num_rows * groups, std::max<int64_t>(1, kElementsWorthAThread / n),
               [&](int64_t begin, int64_t end) {
                 std::vector<float> y((n + kPair - 1) / kPair * kPair);
                 for (int64_t block = begin; block < end; ++block) {
                   const int64_t row = block / groups, group = block % groups;
                   const T* gate = static_cast<const T*>(args.input) + args.input_rows.offset(row) + group * n;
                   const float largest = multiply(y.data(), gate, gate + args.width, n);
                   const float scale = std::max(std::min(largest / args.largest(), float{args.most}), args.least());
                   args.scales[row * args.scales_row + group * args.scales_group] = scale;
                   Code* out = static_cast<Code*>(args.out) + args.out_rows.offset(row) + group * n;
                   const Divisor by(scale, largest);
                   each_pair(0, n, [=, y = y.data()](int64_t i, int64_t count) {
                     const Pair<T> products = {load(y + i), load(y + i + kWidth)};
                     store_quantised(out + i, products / by, count);
                   });
                 }
               });
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
