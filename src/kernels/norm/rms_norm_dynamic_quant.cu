// y = R_T(R_T(s * r) * weight),  r = 1 / sqrt(sum(s^2) / hidden_size + epsilon),  s = input or input + residual, not
// rounded.  Then for each row, or for each group within it, scale = max|y| over the largest code, and the codes of
// y / scale.  Mapping and floor: row_norm.cuh.
#include "cuda/quantise.cuh"
#include "cuda/quotient.cuh"
#include "norm/rms_norm_dynamic_quant.h"
#include "norm/row_norm.cuh"

namespace pykv {
namespace {

// Codes by a scale: E4M3 divides, int8 multiplies with the scale's inverse.
template <class T>
class Coder {
 public:
  __device__ void scale_by(float scale, bool int8) {
    if (int8) {
      inverse_ = 1.0f / scale;
    } else {
      quotient_ = Quotient(scale);
    }
  }
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(Vec<float, kSize> y, bool int8) const {
    if (int8) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) y[i] *= inverse_;
      return quantise<DType::kInt8>(y);
    }
    quotient_.divide<T>(y.elements);
    return quantise<DType::kFloat8E4M3>(y);
  }

 private:
  float inverse_ = 1.0f;
  Quotient quotient_{1.0f};
};

template <Largest kOf>
struct Codes {
  template <class T, bool kAligned>
  struct Result {
    using Args = RmsNormDynamicQuantArgs;
    using Raw = Pack<T>;
    using Value = Pack<T>;
    static constexpr Largest kLargest = kOf;

    Packs<uint8_t, kPackSize<T>, kAligned> out;
    Weights<T, kAligned> weights;
    const Args& args;
    float* scales;  // of the row
    float bound, scale = 1.0f;
    Coder<T> coder;

    __device__ static Part part_of(const Args& args, int64_t row) {
      return {row, 0, static_cast<int>(args.hidden_size)};
    }
    __device__ Result(const Args& args, const Part& part)
        : out(part.of<uint8_t, kPackSize<T>, kAligned>(args.out, args.out_rows)),
          weights(args.weights, 1.0f, part),
          args(args),
          scales(args.scales + part.row * args.scale_row),
          bound(args.bound()) {}
    __device__ int group_size() const { return static_cast<int>(args.group_size); }
    __device__ Raw load(int pack) const { return weights.load(pack); }
    __device__ Value scaled(int pack, const Vec<float, kPackSize<T>>& v, const Raw& raw) const {
      const auto w = weights.floats(pack, raw);
      auto y = to_floats(round_to<T>(v));
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) y[i] *= w[i];
      return round_to<T>(y);
    }
    __device__ void scale_by(float most) {
      scale = args.scale_of(most, bound);
      coder.scale_by(scale, args.int8);
    }
    __device__ void store_scale(int group) const { scales[group * args.scale_group] = scale; }
    __device__ void store(int pack, const Value& v) const { out.store(pack, coder.codes(to_floats(v), args.int8)); }
  };
};

template <class T, template <class, bool> class Source>
void run(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  const bool whole = in_packs<T>(args, 1, sizeof(T));
  if (args.group_size == args.hidden_size) {
    launch_row_norm<Source, Codes<Largest::kOfRow>::Result, T>(args, whole, true, launch,
                                                               "rms_norm_dynamic_per_token_quant");
  } else {
    launch_row_norm<Source, Codes<Largest::kOfGroups>::Result, T>(args, whole && args.group_size % kPackSize<T> == 0,
                                                                  in_lanes<T>(args.group_size), launch,
                                                                  "rms_norm_per_block_quant");
  }
}

}  // namespace

void rms_norm_dynamic_quant_cuda(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if (args.residual) {
      run<T, WithResidual<T, false>::template Source>(args, launch);
    } else {
      run<T, Input>(args, launch);
    }
  });
}

}  // namespace pykv
