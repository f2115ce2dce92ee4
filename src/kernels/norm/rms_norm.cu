// out = z * r * (weight + offset),  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon),  z = input or R(input + residual), R
// the residual's dtype.  Mapping and floor: row_norm.cuh.
#include "norm/rms_norm.h"
#include "norm/row_norm.cuh"

namespace pykv {
namespace {

template <class T, Fit kFit>
struct Scaled {
  using Args = RmsNormArgs;
  using Raw = Pack<T>;
  using Value = Pack<T>;
  static constexpr Largest kLargest = Largest::kNothing;

  Packs<T, kPackSize<T>, kFit> out;
  Weights<T, kFit> weights;
  float offset;

  __device__ static Part part_of(const Args& args, uint32_t row) {
    return {row, 0, static_cast<int>(args.hidden_size)};
  }
  __device__ Scaled(const Args& args, const Part& part)
      : out(part.of<T, kPackSize<T>, kFit>(args.out, args.out_rows)),
        weights(args.weights, 1.0f, part),
        offset(args.weight_offset) {}
  __device__ void have_ready() { pykv::have_ready(out.data); }
  __device__ static void prefetch(const Args& args, const Part& part, int pack) {
    Weights<T, kFit>(args.weights, 1.0f, part).prefetch(pack);
  }
  __device__ void load(int pack, Raw& raw) const { raw = weights.load(pack); }
  __device__ Value scaled(int pack, Vec<float, kPackSize<T>> v, const Raw& raw) const {
    const auto w = weights.floats(pack, raw);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) v[i] *= w[i] + offset;
    return round_to<T>(v);
  }
  __device__ void store(int pack, const Value& v) const { out.store(pack, v); }
};

template <class T, template <class, Fit> class Source>
void run(const RmsNormArgs& args, int64_t residual_size, const Launch& launch) {
  launch_row_norm<Source, Scaled, T, 2>(args, fit_of<T>(args, sizeof(T), residual_size), true, launch, "rms_norm");
}

}  // namespace

void rms_norm_cuda(const RmsNormArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if (!args.residual) return run<T, Input>(args, 0, launch);
    if constexpr (sizeof(T) < 4) {
      if (args.wide_residual) return run<T, WithResidual<float, true>::template Source>(args, 4, launch);
    }
    run<T, WithResidual<T, true>::template Source>(args, sizeof(T), launch);
  });
}

}  // namespace pykv
