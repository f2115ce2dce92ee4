// y = R_T(R_T(s * r) * weight),  r = 1 / sqrt(sum(s^2) / hidden_size + epsilon),  s = input or input + residual, not
// rounded.  Then for each row, or for each group within it, scale = max|y| over the largest code, and the codes of
// y / scale.  Mapping and floor: row_norm.cuh.
#pragma once
#include <cfloat>

#include "cuda/quantise.cuh"
#include "cuda/quotient.cuh"
#include "norm/rms_norm_dynamic_quant.h"
#include "norm/row_norm.cuh"

namespace pykv {
namespace {

// Codes by a scale: E4M3 divides, int8 multiplies with the scale's inverse.
template <class T, bool kInt8>
class Coder {
 public:
  __device__ explicit Coder(float scale) : quotient_(scale), infinite_(scale > FLT_MAX) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y) const {
    return quantise_pairs(y, infinite_, [this](Vec<float, kSize> x) {
      quotient_.template divide<T>(x.elements);
      return x;
    });
  }
  // Nothing unusual: what the compiler leaves out where it knows that.
  __device__ bool is_plain() const { return quotient_.is_plain() && !infinite_; }

 private:
  Quotient quotient_;
  bool infinite_;
};
template <class T>
class Coder<T, true> {
 public:
  __device__ explicit Coder(float scale) : inverse_(1.0f / scale) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y) const {
    auto x = to_floats(y);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= inverse_;
    return quantise<DType::kInt8>(x);
  }
  __device__ bool is_plain() const { return true; }
  __device__ Coder of_lane(int lane, int lanes) const {
    Coder other = *this;
    other.inverse_ = __shfl_sync(0xffffffffu, inverse_, lane, lanes);
    return other;
  }

 private:
  float inverse_;
};

// Codes of numbers, none of them NaN, by the scale of a largest magnitude of kMostPlain or less.
template <class T, bool kInt8>
class PlainCoder : public Coder<T, true> {
 public:
  __device__ explicit PlainCoder(float scale) : Coder<T, true>(scale) {}
};
template <class T>
class PlainCoder<T, false> {
 public:
  __device__ explicit PlainCoder(float scale) : quotient_(Quotient::plain(scale)) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y) const {
    auto x = to_floats(y);
    quotient_.template divide<T>(x.elements);
    return quantise<DType::kFloat8E4M3, true>(x);
  }
  // What the lane of this number among each `lanes` lanes has.
  __device__ PlainCoder of_lane(int lane, int lanes) const {
    return PlainCoder(quotient_.template of_lane<T>(lane, lanes));
  }

 private:
  __device__ explicit PlainCoder(const Quotient& quotient) : quotient_(quotient) {}
  Quotient quotient_;
};

template <Largest kOf>
struct Codes {
  template <class T, Fit kFit>
  struct Result {
    using Args = RmsNormDynamicQuantArgs;
    using Element = T;
    using Raw = Pack<T>;
    using Value = Pack<T>;
    static constexpr Largest kLargest = kOf;
    template <bool kInt8>
    using Coder = pykv::Coder<T, kInt8>;
    template <bool kInt8>
    using PlainCoder = pykv::PlainCoder<T, kInt8>;
    static constexpr float kMostPlain = Quotient::kMostPlain;

    Packs<uint8_t, kPackSize<T>, kFit> out;
    Weights<T, kFit> weights;
    const Args& args;
    float* scales;  // of the row
    float bound;

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
    __device__ static void prefetch(const Args& args, const Part& part, int pack) {
      Weights<T, kFit>(args.weights, 1.0f, part).prefetch(pack);
    }
    __device__ void load(int pack, Raw& raw) const { raw = weights.load(pack); }
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
    // What the largest magnitude counts as, and the scale by it.
    __device__ float bounded(float most) const { return bound < most ? bound : most; }
    template <bool kInt8>
    __device__ float scale_by(float most) const {
      constexpr float kLast = kInt8 ? 127.0f : 448.0f;
      const float scale = most > FLT_MAX ? most : corrected(most * (1.0f / kLast), most, kLast, 1.0f / kLast);
      return fmaxf(scale, kInt8 ? 0x1p-23f : 1.0f / (448.0f * 512.0f));
    }
    template <bool kInt8>
    __device__ float scale_of(float most) const {
      return scale_by<kInt8>(bounded(most));
    }
    // row: from this one on, where it is not 0 one of those of which has_pairs() says that scales lie side by side.
    __device__ void store_scale(int group, float scale, int row = 0) const {
      scales[group * args.scale_group + row] = scale;
    }
    __device__ void have_ready() {
      if constexpr (kFit != Fit::kAny && kOf == Largest::kOfRow) pykv::have_ready(out.data);
    }
    template <class C>
    __device__ void store(int pack, const Value& v, const C& coder, int row = 0) const {
      auto to = out;
      to.data += row * args.out_rows.stride0;
      to.store(pack, coder.codes(v));
    }
    static bool has_pairs(const Args& args) { return kOf == Largest::kOfGroups && args.scale_row == 1; }
  };
};

template <class T, template <class, Fit> class Source>
void run(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  const Fit fit = fit_of<T>(args, 1, sizeof(T));
  if (args.group_size == args.hidden_size) {
    launch_row_norm<Source, Codes<Largest::kOfRow>::Result, T, 2>(args, fit, true, launch,
                                                                  "rms_norm_dynamic_per_token_quant");
  } else {
    launch_row_norm<Source, Codes<Largest::kOfGroups>::Result, T, 4>(
        args, args.group_size % kPackSize<T> == 0 ? fit : Fit::kAny, in_lanes<T>(args.group_size), launch,
        "rms_norm_per_block_quant");
  }
}

}  // namespace

// rms_norm_dynamic_quant_cuda where there is a residual, kernels of their own.
void rms_norm_dynamic_quant_residual_cuda(const RmsNormDynamicQuantArgs& args, const Launch& launch);

}  // namespace pykv
