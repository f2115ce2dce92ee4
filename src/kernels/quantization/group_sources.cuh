// What the kernels of group_quant.cu share: where the numbers of groups come from, and which group is whose.
#pragma once

#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/e2m1.cuh"
#include "cuda/largest.cuh"
#include "cuda/nvfp4.cuh"
#include "cuda/quantise.cuh"
#include "cuda/silu.cuh"
#include "quantization/group_quant.h"
#include "quantization/packs.cuh"

namespace pykv {

struct GroupPlan {
  Divider groups;      // of a row; of four-bit codes units of 32 elements, where a thread has one
  Divider valid_rows;  // ValidRows::rows
  uint32_t total;
  int lane_bits;
  bool aligned;
  bool scale_bytes;  // of one-byte codes
};

template <class T>
struct Elements {
  using Raw = Pack<T>;
  static constexpr int kHalves = 1;
  __device__ explicit Elements(const GroupQuantArgs&) {}
  __device__ static Raw load(const T* from, int64_t) { return load_vec_in_order<Pack<T>>(from); }
  __device__ static Raw load_some(const T* from, int64_t, int count, bool aligned) {
    return load_pack(from, count, aligned);
  }
  __device__ static void prefetch(const T* from, int64_t) { pykv::prefetch(from); }
  __device__ Pack<T> value(const Raw& raw) const { return raw; }
};

template <class T>
struct Gated {
  struct Raw {
    Pack<T> gate, up;
  };
  static constexpr int kHalves = 2;
  __device__ static Raw load(const T* from, int64_t width) {
    return {load_vec_in_order<Pack<T>>(from), load_vec_in_order<Pack<T>>(from + width)};
  }
  __device__ static Raw load_some(const T* from, int64_t width, int count, bool aligned) {
    return {load_pack(from, count, aligned), load_pack(from + width, count, aligned)};
  }
  __device__ static void prefetch(const T* from, int64_t width) {
    pykv::prefetch(from);
    pykv::prefetch(from + width);
  }
};

template <class T>
struct SiluAndMul : Gated<T> {
  __device__ explicit SiluAndMul(const GroupQuantArgs&) {}
  __device__ Pack<T> value(const typename Gated<T>::Raw& raw) const { return silu_and_mul(raw.gate, raw.up); }
};

template <class T>
struct SituAndMul : Gated<T>, Situ<T> {
  __device__ explicit SituAndMul(const GroupQuantArgs& args) : Situ<T>(args.beta, args.linear_beta) {}
  __device__ Pack<T> value(const typename Gated<T>::Raw& raw) const {
    auto x = to_floats(raw.gate);
    const auto up = to_floats(raw.up);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) x[i] = this->activation(x[i]);
    if (this->linear_beta > 0.0f) {  // asked once
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) x[i] = this->product(x[i], up[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) x[i] *= up[i];
    }
    return round_to<T>(x);
  }
};

// ValidRows::has without a division.
__device__ inline bool is_valid(const GroupQuantArgs& args, const GroupPlan& plan, int64_t row) {
  if (!args.valid.counts.data) return true;
  uint32_t within;
  const uint32_t of = plan.valid_rows(static_cast<uint32_t>(row), within);
  return within < args.valid.rows_of(args.valid.counts[of]);
}

// Of e4m3 scales what multiplies them, of fp32 ones what they are at most.
__device__ inline float given_of(const GroupQuantArgs& args, const ScaleRow& row) {
  return args.globals ? args.globals[row.expert] : float{args.given};
}

// The largest magnitude as bits, above those of infinity where there is NaN.
template <class T, int kSize, int kCount>
__device__ uint32_t largest_bits(const Vec<T, kSize> (&v)[kCount]) {
  if constexpr (kInWords<T, kSize>) {
    uint32_t most = v[0].words[0];
#pragma unroll
    for (int i = 1; i < kCount * kSize / 2; ++i)
      most = larger_magnitudes_or_nan<T>(most, v[i / (kSize / 2)].words[i % (kSize / 2)]);
    most = larger_magnitudes_or_nan<T>(most, __byte_perm(most, most, 0x1032));
    return __float_as_uint(word_to_floats<T>(most & 0x7fff7fffu).y);
  } else {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kCount * kSize; ++i) most = max(most, __float_as_uint(v[i / kSize][i % kSize]) & 0x7fffffffu);
    return most;
  }
}
inline constexpr uint32_t kInfinity = 0x7f800000u;

// Codes of finite numbers by a factor of their own, which makes none larger than the largest code.
template <QuantCode kCodes, class T, int kSize>
__device__ Vec<uint8_t, kSize> codes_inside(const Vec<T, kSize>& x, float factor) {
  auto v = to_floats(x);
#pragma unroll
  for (int i = 0; i < kSize; ++i) v[i] *= factor;
  if constexpr (kCodes == QuantCode::kE4M3) {
    return quantise<DType::kFloat8E4M3, true>(v);
  } else {
    // The sum with 1.5 * 2^23 has the nearest integer in its lowest bits; a conversion takes eight times as long.
    const auto sum = [&](int i) { return __float_as_uint(__fadd_rn(v[i], 12582912.0f)); };
    Vec<uint8_t, kSize> codes;
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i)
      codes.words[i] = __byte_perm(__byte_perm(sum(4 * i), sum(4 * i + 1), 0x0040),
                                   __byte_perm(sum(4 * i + 2), sum(4 * i + 3), 0x0040), 0x5410);
    return codes;
  }
}

// Packs of a lane that has 16 elements.
inline constexpr int kLaneElements = kE2m1AtOnce;
template <class T>
inline constexpr int kLanePacks = kLaneElements / kPackSize<T>;

// By how much the codes are wrong: the sum of the squares, of every fourth one after another, then of the four.
template <class T>
__device__ float error_of(const Pack<T> (&y)[kLanePacks<T>], uint2 codes, float unit) {
  constexpr uint32_t kMagnitude = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;
  uint32_t words[4 * sizeof(T)];
  __builtin_memcpy(words, y, sizeof words);
  float sums[4] = {};
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    const uint32_t some = (four < 2 ? codes.x : codes.y) >> (four % 2 * 16) & 0x7777u;
    const uint32_t bytes = __byte_perm(0x3e3c3800u, 0x46444240u, some);  // the higher ones of halves
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 value = word_to_floats<half>(__byte_perm(bytes, 0, i == 0 ? 0x1404 : 0x3424));
      const int e = 4 * four + i;
      float2 x;
      if constexpr (sizeof(T) == 4) {
        x = {__uint_as_float(words[e] & kMagnitude), __uint_as_float(words[e + 1] & kMagnitude)};
      } else {
        x = word_to_floats<T>(words[e / 2] & kMagnitude);
      }
      const float d = __fmaf_rn(-value.x, unit, x.x), next = __fmaf_rn(-value.y, unit, x.y);
      sums[i] = __fmaf_rn(d, d, sums[i]);
      sums[i + 1] = __fmaf_rn(next, next, sums[i + 1]);
    }
  }
  return __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
}

// kInside: no product is NaN, nor 7 or more.
template <class T, bool kInside = false>
__device__ uint2 nibbles_of(const Pack<T> (&y)[kLanePacks<T>], float factor) {
  uint32_t words[4 * sizeof(T)];
  __builtin_memcpy(words, y, sizeof words);
  float scaled[kLaneElements];
  e2m1_multiply<T>(words, factor, scaled);
  if constexpr (!kInside) {
#pragma unroll
    for (float& v : scaled) v = fminf(v, 6.0f);
  }
  return e2m1_codes<T>(words, scaled);
}

// Of the codes of a block by its scale and by another, with what a code of 1 is by either, those that lead closer.
template <class T, bool kInside = false>
__device__ void choose_closer(const Pack<T> (&y)[kLanePacks<T>], const GroupScale& other, float other_unit, float unit,
                              GroupScale& scale, uint2& nibbles) {
  const uint2 others = nibbles_of<T, kInside>(y, other.factor);
  if (error_of(y, others, other_unit) < error_of(y, nibbles, unit)) scale = other, nibbles = others;
}
template <class T>
__device__ void choose_four_over_six(const GroupQuantArgs& args, const Pack<T> (&y)[kLanePacks<T>], float most,
                                     float global, GroupScale& scale, uint2& nibbles) {
  const GroupScale other = args.rule(most, global, 4.0f);
  const float inverse = 1.0f / fabsf(global);
  const auto unit = [&](const GroupScale& s) { return __fmul_rn(magnitude_of_e4m3(s.stored & 0x7fu), inverse); };
  choose_closer(y, other, unit(other), unit(scale), scale, nibbles);
}

}  // namespace pykv
