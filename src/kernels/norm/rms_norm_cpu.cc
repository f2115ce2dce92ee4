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
      : out(row_at<T>(args.out, args.out_rows, row)), weights(args.weights, 1.0f, row), offset(args.weight_offset) {}
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const { return v * (weights(i, count) + offset); }
};

}  // namespace

void rms_norm_cpu(const RmsNormArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const auto scaled = [&](int64_t row) { return Scaled<T>(args, row); };
    if (!args.residual) {
      norm_rows<Input<T>>(args, scaled);
    } else if (sizeof(T) < 4 && args.rounds_last) {
      norm_rows<WithResidual<T, sizeof(T) == 4>>(args, scaled);
    } else {
      norm_rows<WithResidual<T, true>>(args, scaled);
    }
  });
}

}  // namespace pykv::PYKV_ISA
