// y = R_T(R_T(s * r) * weight),  r = 1 / sqrt(sum(s^2) / hidden_size + epsilon),  s = input or input + residual, not
// rounded.  Then for each row, or for each group within it, scale = max|y| over the largest code, and the codes of
// y / scale.  Mapping and floor: row_norm.cuh.
#include <cfloat>

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
      infinite_ = scale > FLT_MAX;
    }
  }
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y, bool int8) const {
    if (int8) {
      auto x = to_floats(y);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= inverse_;
      return quantise<DType::kInt8>(x);
    }
    return quantise_pairs(y, infinite_, [this](Vec<float, kSize> x) {
      quotient_.template divide<T>(x.elements);
      return x;
    });
  }
  // Whether of_lane may be used of it: which gives what another lane of the warp has.
  __device__ bool is_plain(bool int8) const { return int8 || (quotient_.is_plain() && !infinite_); }
  __device__ Coder of_lane(int lane, bool int8) const {
    Coder other;
    if (int8) {
      other.inverse_ = __shfl_sync(0xffffffffu, inverse_, lane);
    } else {
      other.quotient_ = quotient_.of_lane<T>(lane);
    }
    return other;
  }

 private:
  float inverse_ = 1.0f;
  bool infinite_ = false;
  Quotient quotient_{1.0f};
};

// x / divisor, rounded as a division is: Markstein's correction.
__device__ inline float divide(float x, float divisor, float inverse) {
  const float quotient = x * inverse;
  return x > FLT_MAX ? x : fmaf(fmaf(-divisor, quotient, x), inverse, quotient);
}

template <Largest kOf>
struct Codes {
  template <class T, Fit kFit>
  struct Result {
    using Args = RmsNormDynamicQuantArgs;
    using Raw = Pack<T>;
    using Value = Pack<T>;
    static constexpr Largest kLargest = kOf;

    Packs<uint8_t, kPackSize<T>, kFit> out;
    Weights<T, kFit> weights;
    const Args& args;
    float* scales;  // of the row
    float bound, scale = 1.0f;
    Coder<T> coder;

    __device__ static Part part_of(const Args& args, uint32_t row) {
      return {row, 0, static_cast<int>(args.hidden_size)};
    }
    __device__ Result(const Args& args, const Part& part)
        : out(part.of<uint8_t, kPackSize<T>, kFit>(args.out, args.out_rows)),
          weights(args.weights, 1.0f, part),
          args(args),
          scales(args.scales + part.row * args.scale_row),
          bound(args.bound()) {}
    __device__ int group_size() const { return static_cast<int>(args.group_size); }
    __device__ void move_to(const Args& args, const Part& part) {
      out = part.of<uint8_t, kPackSize<T>, kFit>(args.out, args.out_rows);
      scales = args.scales + part.row * args.scale_row;
    }
    __device__ static void prefetch(const Args& args, const Part& part, int pack) {
      Weights<T, kFit>(args.weights, 1.0f, part).prefetch(pack);
    }
    __device__ Raw load(int pack) const { return weights.load(pack); }
    __device__ Value scaled(int pack, const Vec<float, kPackSize<T>>& v, const Raw& raw) const {
      auto rounded = round_to<T>(v);
      if constexpr (sizeof(T) < 4) {
        if (!weights.is_float32) {
#pragma unroll
          for (int i = 0; i < kPackSize<T> / 2; ++i)
            rounded.words[i] = multiply_pairs<T>(rounded.words[i], raw.words[i]);
          return rounded;
        }
      }
      const auto w = weights.floats(pack, raw);
      auto y = to_floats(rounded);
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) y[i] *= w[i];
      return round_to<T>(y);
    }
    __device__ void scale_by(float most) {
      most = bound < most ? bound : most;
      scale = args.int8 ? fmaxf(divide(most, 127.0f, 1.0f / 127.0f), 0x1p-23f)
                        : fmaxf(divide(most, 448.0f, 1.0f / 448.0f), 1.0f / (448.0f * 512.0f));
      coder.scale_by(scale, args.int8);
    }
    __device__ bool is_plain() const { return coder.is_plain(args.int8); }
    __device__ Result of_lane(int lane) const {
      Result other = *this;
      other.coder = coder.of_lane(lane, args.int8);
      return other;
    }
    __device__ void store_scale(int group) const { scales[group * args.scale_group] = scale; }
    __device__ void store(int pack, const Value& v) const { out.store(pack, coder.codes(v, args.int8)); }
  };
};

template <class T, template <class, Fit> class Source>
void run(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  const Fit fit = fit_of<T>(args, 1, sizeof(T));
  if (args.group_size == args.hidden_size) {
    launch_row_norm<Source, Codes<Largest::kOfRow>::Result, T, true>(args, fit, true, launch,
                                                                     "rms_norm_dynamic_per_token_quant");
  } else {
    launch_row_norm<Source, Codes<Largest::kOfGroups>::Result, T, true>(
        args, args.group_size % kPackSize<T> == 0 ? fit : Fit::kAny, in_lanes<T>(args.group_size), launch,
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
