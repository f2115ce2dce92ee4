// y = R_T(z * r * weight),  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon),  z = input or R_T(input + residual): as the norm
// alone has it.  Then for each row, or for each group within it, scale = max|y| over the largest code, and the codes of
// y / scale (E4M3 of rows) or y * (1 / scale) (others).  Mapping and floor: row_norm.cuh.
#include <cfloat>

#include "cuda/quantise.cuh"
#include "cuda/quotient.cuh"
#include "norm/rms_norm_dynamic_quant.h"
#include "norm/row_launch.cuh"

namespace pykv {
namespace {

template <int kSize>
__device__ Vec<float, kSize> times(Vec<float, kSize> x, float factor) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] *= factor;
  return x;
}

// Codes of a row by its scale: E4M3 divides, int8 multiplies with the scale's inverse.
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
    return quantise<DType::kInt8>(times(to_floats(y), inverse_));
  }
  __device__ bool is_plain() const { return true; }

 private:
  float inverse_;
};

// 1 / scale, the nearest number, for scales as largest magnitudes make them: infinity, or so far from the smallest and the
// largest numbers that their inverses are ordinary.
__device__ inline float inverse_of(float scale) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(scale));
  return scale > FLT_MAX ? 0.0f : fmaf(r, fmaf(-scale, r, 1.0f), r);
}

// Codes of a group by its scale: both kinds multiply with the scale's inverse.
template <class T>
class GroupCoder {
 public:
  __device__ GroupCoder(float scale, bool int8) : inverse_(inverse_of(scale)), int8_(int8) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y) const {
    const auto x = times(to_floats(y), inverse_);
    return int8_ ? quantise<DType::kInt8>(x) : quantise<DType::kFloat8E4M3>(x);
  }

 private:
  float inverse_;
  bool int8_;
};

// The same for numbers, none of them NaN, by the scale of a largest magnitude of kMostPlain or less.
template <class T, bool kInt8>
class PlainCoder {
 public:
  __device__ explicit PlainCoder(float scale) : inverse_(inverse_of(scale)) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y) const {
    return quantise<kInt8 ? DType::kInt8 : DType::kFloat8E4M3, true>(times(to_floats(y), inverse_));
  }
  // What the lane of this number among each `lanes` lanes has.
  __device__ PlainCoder of_lane(int lane, int lanes) const {
    PlainCoder other = *this;
    other.inverse_ = __shfl_sync(0xffffffffu, inverse_, lane, lanes);
    return other;
  }

 private:
  float inverse_;
};

// Codes of a row as Coder makes them, of the one kind or the other.
template <class T>
class RowCoder {
 public:
  __device__ RowCoder(float scale, bool int8) : e4m3_(scale), of_int8_(scale), int8_(int8) {}
  template <int kSize>
  __device__ Vec<uint8_t, kSize> codes(const Vec<T, kSize>& y) const {
    return int8_ ? of_int8_.codes(y) : e4m3_.codes(y);
  }

 private:
  Coder<T, false> e4m3_;
  Coder<T, true> of_int8_;
  bool int8_;
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
    using EitherCoder = std::conditional_t<kOf == Largest::kOfRow, RowCoder<T>, GroupCoder<T>>;

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
    // The rounding to T in between is that of the norm alone.
    __device__ Value scaled(int pack, Vec<float, kPackSize<T>> v, const Raw& raw) const {
      const auto w = weights.floats(pack, raw);
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) v[i] *= w[i];
      return round_to<T>(v);
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
    __device__ float scale_of_either(float most) const {
      return args.int8 ? scale_of<true>(most) : scale_of<false>(most);
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

template <class T, template <class, Fit> class Source, Largest kOf, bool kExact>
void run(const RmsNormDynamicQuantArgs& args, const char* op, const Launch& launch) {
  constexpr bool kGroups = kOf == Largest::kOfGroups;
  const Fit fit = kGroups && args.group_size % kPackSize<T> != 0 ? Fit::kAny : fit_of<T>(args, 1, sizeof(T));
  const bool stays = !kGroups || in_lanes<T>(args.group_size);
  if constexpr (kExact) {
    if (stays && launch_exact<Source, Codes<kOf>::template Result, T, 2>(args, fit, launch, op)) return;
  }
  launch_row_norm<Source, Codes<kOf>::template Result, T, 2, false, WithOrWithoutResidual<true>::Source>(
      args, fit, stays, launch, op);
}

template <Largest kOf>
void run(const RmsNormDynamicQuantArgs& args, const char* op, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 4) {
      run<T, WithOrWithoutResidual<true>::template Source, kOf, false>(args, op, launch);
    } else if (args.residual) {
      run<T, WithResidual<true>::template Source, kOf, false>(args, op, launch);
    } else {
      run<T, Input, kOf, true>(args, op, launch);
    }
  });
}

}  // namespace

void rms_norm_dynamic_quant_cuda(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  if (args.per_token) {
    run<Largest::kOfRow>(args, "rms_norm_dynamic_per_token_quant", launch);
  } else {
    run<Largest::kOfGroups>(args, "rms_norm_per_block_quant", launch);
  }
}

}  // namespace pykv
