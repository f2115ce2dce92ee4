// Twin of rms_norm_dynamic_quant.cu.
#include "cpu/quantise.h"
#include "norm/rms_norm_dynamic_quant.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T, class Code>
struct Codes {
  using Element = Code;
  using Kept = T;
  static constexpr bool kByLargest = true;
  static constexpr bool kInt8 = std::is_same_v<Code, int8_t>;
  const RmsNormDynamicQuantArgs& args;
  Code* out;
  Weights<T> weights;
  float* scales;  // of the row
  float bound;
  Divisor scale{1.0f, 0.0f};
  float inverse = 1.0f;

  Codes(const RmsNormDynamicQuantArgs& args, int64_t row)
      : args(args),
        out(row_at<Code>(args.out, args.out_rows, row)),
        weights(args.weights, 1.0f),
        scales(args.scales + row * args.scale_row),
        bound(args.bound()) {}
  int64_t group_size() const { return args.group_size; }
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const { return rounded<true>(v) * weights(i, count); }
  void scale_by(int64_t index, float most) {
    const float s = args.scale_of(most, bound);
    scales[index * args.scale_group] = s;
    scale = {s, most};
    inverse = 1.0f / s;
  }
  // E4M3 divides, int8 multiplies with the scale's inverse.
  void store(Code* to, Pair<T> v, int64_t count, bool past) const {
    if constexpr (kInt8) {
      store_quantised(to, v * inverse, count, past);
    } else {
      store_quantised(to, v / scale, count, past);
    }
  }
};

template <class T, class Source>
void run(const RmsNormDynamicQuantArgs& args) {
  if (args.int8) {
    norm_rows<Source>(args, [&](int64_t row) { return Codes<T, int8_t>(args, row); });
  } else {
    norm_rows<Source>(args, [&](int64_t row) { return Codes<T, e4m3>(args, row); });
  }
}

}  // namespace

void rms_norm_dynamic_quant_cpu(const RmsNormDynamicQuantArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (args.residual) {
      run<T, WithResidual<T, T, false>>(args);
    } else {
      run<T, Input<T>>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
