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
  int64_t group_size(int64_t n) const { return n; }
  Floats scaled(int64_t i, Floats v, int64_t count) const { return v * weights(i, count) + bias(i, count); }
  void store(T* to, Floats v, int64_t count) const { PYKV_ISA::store(to, v, count); }
};

}  // namespace

void layer_norm_cpu(const LayerNormArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (args.residual) {
      norm_rows<WithResidual<T, T, true>, ScaledAndShifted<T>, true>(args);
    } else {
      norm_rows<Input<T>, ScaledAndShifted<T>, true>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
