// out = z * r * (weight + offset),  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon),  z = input or R_T(input + residual), or
// that sum in fp32.  Mapping and floor: row_norm.cuh.
#include "norm/rms_norm.h"
#include "norm/row_launch.cuh"

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
void run(const RmsNormArgs& args, const char* op, const Launch& launch) {
  const Fit fit = fit_of<T>(args, sizeof(T), sizeof(T));
  if (launch_exact<Source, Scaled, T, 2>(args, fit, launch, op)) return;
  launch_row_norm<Source, Scaled, T, 2, false, WithOrWithoutResidual<true>::Source>(args, fit, true, launch, op);
}

}  // namespace

void rms_norm_cuda(const RmsNormArgs& args, const Launch& launch) {
  const char* const op = "rms_norm";
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 4) {
      run<T, WithOrWithoutResidual<true>::Source>(args, op, launch);
    } else if (!args.residual) {
      run<T, Input>(args, op, launch);
    } else if (!args.rounds_last) {
      run<T, WithResidual<true>::Source>(args, op, launch);
    } else {
      const Fit fit = fit_of<T>(args, sizeof(T), sizeof(T));
      launch_row_norm<WithResidual<false>::Source, Scaled, T, 2>(args, fit, true, launch, op);
    }
  });
}

}  // namespace pykv
