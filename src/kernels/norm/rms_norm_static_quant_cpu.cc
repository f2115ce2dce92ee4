// Twin of rms_norm_static_quant.cu.
#include "cpu/quantise.h"
#include "norm/rms_norm_static_quant.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
struct Codes {
  using Element = e4m3;
  static constexpr bool kByLargest = false;
  e4m3* out;
  Weights<T> weights;
  float inverse_scale;

  Codes(const RmsNormStaticQuantArgs& args, int64_t row)
      : out(row_at<e4m3>(args.out, args.out_rows, row)),
        weights(args.weights, 1.0f),
        inverse_scale(1.0f / args.scale) {}
  int64_t group_size(int64_t n) const { return n; }
  Floats scaled(int64_t i, Floats v, int64_t count) const { return rounded<T>(v * weights(i, count)); }
  void store(e4m3* to, Floats v, int64_t count) const { store_quantised(to, v * inverse_scale, count); }
};

}  // namespace

void rms_norm_static_quant_cpu(const RmsNormStaticQuantArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (args.residual) {
      norm_rows<WithResidual<T, T, true>, Codes<T>>(args);
    } else {
      norm_rows<Input<T>, Codes<T>>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
