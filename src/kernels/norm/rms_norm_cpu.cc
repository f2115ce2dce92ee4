// Twin of rms_norm.cu.
#include "norm/rms_norm.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
struct Scaled {
  using Element = T;
  static constexpr bool kByLargest = false;
  T* out;
  Weights<T> weights;
  float offset;

  Scaled(const RmsNormArgs& args, int64_t row)
      : out(row_at<T>(args.out, args.out_rows, row)), weights(args.weights, 1.0f), offset(args.weight_offset) {}
  int64_t group_size(int64_t n) const { return n; }
  Floats scaled(int64_t i, Floats v, int64_t count) const { return v * (weights(i, count) + offset); }
  void store(T* to, Floats v, int64_t count) const { PYKV_ISA::store(to, v, count); }
};

}  // namespace

void rms_norm_cpu(const RmsNormArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (!args.residual) {
      norm_rows<Input<T>, Scaled<T>>(args);
    } else if (args.wide_residual) {
      norm_rows<WithResidual<T, float, true>, Scaled<T>>(args);
    } else {
      norm_rows<WithResidual<T, T, true>, Scaled<T>>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
