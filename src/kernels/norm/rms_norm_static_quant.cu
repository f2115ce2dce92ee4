// out = E4M3(R_T(z * r * weight) / scale),  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon),  z = input or
// R_T(input + residual).  Mapping and floor: row_norm.cuh.
#include <cfloat>

#include "cuda/quantise.cuh"
#include "norm/rms_norm_static_quant.h"
#include "norm/row_launch.cuh"

namespace pykv {
namespace {

template <class T, Fit kFit>
struct Codes {
  using Args = RmsNormStaticQuantArgs;
  using Raw = Pack<T>;
  using Value = Pack<T>;
  static constexpr Largest kLargest = Largest::kNothing;

  Packs<uint8_t, kPackSize<T>, kFit> out;
  Weights<T, kFit> weights;
  float inverse_scale;

  __device__ static Part part_of(const Args& args, uint32_t row) {
    return {row, 0, static_cast<int>(args.hidden_size)};
  }
  __device__ Codes(const Args& args, const Part& part)
      : out(part.of<uint8_t, kPackSize<T>, kFit>(args.out, args.out_rows)),
        weights(args.weights, 1.0f, part),
        inverse_scale(1.0f / args.scale) {}
  __device__ void have_ready() { pykv::have_ready(out.data); }
  __device__ static void prefetch(const Args& args, const Part& part, int pack) {
    Weights<T, kFit>(args.weights, 1.0f, part).prefetch(pack);
  }
  __device__ void load(int pack, Raw& raw) const { raw = weights.load(pack); }
  // The rounding to T in between is that of the norm alone.
  __device__ Value scaled(int pack, Vec<float, kPackSize<T>> v, const Raw& raw) const {
    const auto w = weights.floats(pack, raw);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) v[i] *= w[i];
    return round_to<T>(v);
  }
  __device__ void store(int pack, const Value& v) const {
    const bool odd = !(fabsf(inverse_scale) > 0.0f && fabsf(inverse_scale) <= FLT_MAX);
    out.store(pack, quantise_pairs(v, odd, [this](Vec<float, kPackSize<T>> x) {
#pragma unroll
                for (int i = 0; i < kPackSize<T>; ++i) x[i] *= inverse_scale;
                return x;
              }));
  }
};

}  // namespace

void rms_norm_static_quant_cuda(const RmsNormStaticQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    const char* const op = "rms_norm_static_fp8_quant";
    const Fit fit = fit_of<T>(args, 1, sizeof(T));
    if (!args.residual && launch_exact<Input, Codes, T, 2>(args, fit, launch, op)) return;
    launch_row_norm<WithOrWithoutResidual<true>::Source, Codes, T, 2>(args, fit, true, launch, op);
  });
}

}  // namespace pykv
