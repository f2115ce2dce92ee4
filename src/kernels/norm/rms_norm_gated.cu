// out = R_T(z * r * weight * after),  z = input * before,  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon): one of before
// and after is an activation of the gate, the other 1.  All in fp32, a group at a time.  Mapping and floor: row_norm.cuh.
#include "cuda/approximate.cuh"
#include "norm/rms_norm_gated.h"
#include "norm/row_launch.cuh"

namespace pykv {
namespace {

// x * silu(gate), or x * sigmoid(gate).
template <class T, int kSize>
__device__ Vec<float, kSize> gated(Vec<float, kSize> x, const Vec<T, kSize>& gate, bool sigmoid) {
  const auto g = to_floats(gate);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float s = sizeof(T) < 4 ? rough_sigmoid(g[i]) : __fdividef(1.0f, 1.0f + expf(-g[i]));
    x[i] *= sigmoid ? s : g[i] * s;
  }
  return x;
}

// input, times an activation of the gate if there is one.
template <class T, Fit kFit>
struct GatedInput {
  using Element = T;
  struct Raw {
    Pack<T> input, gate;
  };
  using Value = Vec<float, kPackSize<T>>;
  Packs<T, kPackSize<T>, kFit> input, gate;
  bool has_gate, sigmoid;

  __device__ GatedInput(const RmsNormGatedArgs& args, const Part& part)
      : input(part.of<T, kPackSize<T>, kFit>(args.input, args.input_rows)),
        gate(part.of<T, kPackSize<T>, kFit>(args.gate, args.gate_rows)),
        has_gate(args.gate != nullptr),
        sigmoid(args.sigmoid) {}
  __device__ void prefetch(int pack) const {
    input.prefetch(pack);
    if (has_gate) gate.prefetch(pack);
  }
  __device__ Raw load(int pack) const {
    Raw raw{input.load_in_order(pack), {}};
    if (has_gate) raw.gate = gate.load_in_order(pack);
    return raw;
  }
  __device__ Value value(const Raw& raw) const {
    return has_gate ? gated(to_floats(raw.input), raw.gate, sigmoid) : to_floats(raw.input);
  }
  __device__ void keep(int, const Value&) const {}
};

// kGated: the gate comes after the norm.
template <bool kGated>
struct Grouped {
  template <class T, Fit kFit>
  struct Result {
    using Args = RmsNormGatedArgs;
    struct Raw {
      Pack<T> weight, gate;
    };
    using Value = Pack<T>;
    static constexpr Largest kLargest = Largest::kNothing;

    Packs<T, kPackSize<T>, kFit> out, gate;
    Weights<T, kFit> weights;
    bool sigmoid;

    __device__ static Part part_of(const Args& args, uint32_t row) {
      const int size = static_cast<int>(args.hidden_size);
      if (args.groups == 1) return {row, 0, size};
      const auto groups = static_cast<uint32_t>(args.groups);
      return {row / groups, static_cast<int>(row % groups) * size, size};
    }
    __device__ Result(const Args& args, const Part& part)
        : out(part.of<T, kPackSize<T>, kFit>(args.out, args.out_rows)),
          gate(part.of<T, kPackSize<T>, kFit>(args.gate, args.gate_rows)),
          weights(args.weights, 1.0f, part),
          sigmoid(args.sigmoid) {}
    __device__ void have_ready() { pykv::have_ready(out.data); }
    __device__ static void prefetch(const Args& args, const Part& part, int pack) {
      const Result result(args, part);
      result.weights.prefetch(pack);
      if constexpr (kGated) result.gate.prefetch(pack);
    }
    __device__ void load(int pack, Raw& raw) const { raw.weight = weights.load(pack); }
    __device__ void load_own(int pack, Raw& raw) const
      requires kGated
    {
      raw.gate = gate.load_in_order(pack);
    }
    __device__ Value scaled(int pack, Vec<float, kPackSize<T>> v, const Raw& raw) const {
      const auto w = weights.floats(pack, raw.weight);
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) v[i] *= w[i];
      if constexpr (kGated) v = gated(v, raw.gate, sigmoid);
      return round_to<T>(v);
    }
    __device__ void store(int pack, const Value& v) const { out.store(pack, v); }
  };
};

}  // namespace

void rms_norm_gated_cuda(const RmsNormGatedArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    const char* const op = "rms_norm_gated";
    const Fit fit = std::min(fit_of<T>(args, sizeof(T), sizeof(T)),
                             fit_of_rows(kAccessBytes, args.gate, args.gate_rows, sizeof(T)));
    if (!args.gate || args.gate_first) {
      if (launch_exact<GatedInput, Grouped<false>::Result, T, 1>(args, fit, launch, op)) return;
      return launch_row_norm<GatedInput, Grouped<false>::Result, T, 1>(args, fit, true, launch, op);
    }
    if (launch_exact<Input, Grouped<true>::Result, T, 1>(args, fit, launch, op)) return;
    launch_row_norm<Input, Grouped<true>::Result, T, 1>(args, fit, true, launch, op);
  });
}

}  // namespace pykv
