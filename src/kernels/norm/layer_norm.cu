// out = (z - mean) * r * weight + bias,  r = 1 / sqrt(sum((z - mean)^2) / hidden_size + epsilon),  z = input or
// R_T(input + residual).  Mapping and floor: row_norm.cuh.
#include "norm/layer_norm.h"
#include "norm/row_launch.cuh"

namespace pykv {
namespace {

template <class T, Fit kFit>
struct ScaledAndShifted {
  using Args = LayerNormArgs;
  struct Raw {
    Pack<T> weight, bias;
  };
  using Value = Pack<T>;
  static constexpr Largest kLargest = Largest::kNothing;

  Packs<T, kPackSize<T>, kFit> out;
  Weights<T, kFit> weights, bias;

  __device__ static Part part_of(const Args& args, uint32_t row) {
    return {row, 0, static_cast<int>(args.hidden_size)};
  }
  __device__ ScaledAndShifted(const Args& args, const Part& part)
      : out(part.of<T, kPackSize<T>, kFit>(args.out, args.out_rows)),
        weights(args.weights, 1.0f, part),
        bias(args.bias, 0.0f, part) {}
  __device__ void have_ready() { pykv::have_ready(out.data); }
  __device__ static void prefetch(const Args& args, const Part& part, int pack) {
    Weights<T, kFit>(args.weights, 1.0f, part).prefetch(pack);
    Weights<T, kFit>(args.bias, 0.0f, part).prefetch(pack);
  }
  __device__ void load(int pack, Raw& raw) const { raw = {weights.load(pack), bias.load(pack)}; }
  __device__ Value scaled(int pack, Vec<float, kPackSize<T>> v, const Raw& raw) const {
    const auto w = weights.floats(pack, raw.weight), b = bias.floats(pack, raw.bias);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) v[i] = fmaf(v[i], w[i], b[i]);
    return round_to<T>(v);
  }
  __device__ void store(int pack, const Value& v) const { out.store(pack, v); }
};

}  // namespace

void layer_norm_cuda(const LayerNormArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    const Fit fit = std::min(fit_of<T>(args, sizeof(T), sizeof(T)), fit_of_weights<T>(args.bias));
    const bool done =
        !args.residual && launch_exact<Input, ScaledAndShifted, T, 2, true>(args, fit, launch, "layer_norm");
    if (!done)
      launch_row_norm<WithOrWithoutResidual<true>::Source, ScaledAndShifted, T, 2, true>(args, fit, true, launch,
                                                                                         "layer_norm");
  });
}

}  // namespace pykv
