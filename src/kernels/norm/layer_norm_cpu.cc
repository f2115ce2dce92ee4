// Twin of layer_norm.cu.
#include "norm/layer_norm.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
struct ScaledAndShifted {
  using Element = T;
  static constexpr bool kByLargest = false;
  T* out;
  Weights<T> weights, bias;

  ScaledAndShifted(const LayerNormArgs& args, int64_t row)
      : out(row_at<T>(args.out, args.out_rows, row)), weights(args.weights, 1.0f), bias(args.bias, 0.0f) {}
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const { return v * weights(i, count) + bias(i, count); }
};

}  // namespace

void layer_norm_cpu(const LayerNormArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const auto scaled = [&](int64_t row) { return ScaledAndShifted<T>(args, row); };
    if (args.residual) {
      norm_rows<WithResidual<T, true>, true>(args, scaled);
    } else {
      norm_rows<Input<T>, true>(args, scaled);
    }
  });
}

}  // namespace pykv::PYKV_ISA
