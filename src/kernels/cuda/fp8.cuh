// One-byte floats of the KV cache: E4M3 (largest 448, no infinity) and E5M2 (largest 57344).
//
// stored = value / scale, a true division, rounded to nearest even; infinities and everything too large become the largest
// finite value; NaN becomes 0x7F (E4M3) or 0x7E (E5M2) with its sign.  Loads are exact: every code is a half.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/dtype.h"
#include "cuda/types.cuh"

namespace pykv {

template <KvFormat kFormat>
inline constexpr __nv_fp8_interpretation_t kInterpretation = kFormat == KvFormat::kE4M3 ? __NV_E4M3 : __NV_E5M2;

// Two codes, the first in the lower byte.
template <KvFormat kFormat>
__device__ __forceinline__ half2 fp8x2_to_half2(uint16_t codes) {
  return half2(__nv_cvt_fp8x2_to_halfraw2(codes, kInterpretation<kFormat>));
}

template <KvFormat kFormat>
__device__ __forceinline__ float2 fp8x2_to_float2(uint16_t codes) {
  return __half22float2(fp8x2_to_half2<kFormat>(codes));
}

template <KvFormat kFormat>
__device__ __forceinline__ float fp8_to_float(uint8_t code) {
  return fp8x2_to_float2<kFormat>(code).x;
}

// x / scale, rounded as a division is wherever rounding it further to fp8 depends on that.
//
// 1 / scale is held as a sum, r + rest with r the float below it: x * r + x * rest is two instructions instead of a
// division's ten.  Both products carry one sign, so that infinities and overflow come through and saturate.  For every
// scale this rounds all quotients of half and bf16 to the code that a division leads to (checked exhaustively); 24-bit
// numerators take one Newton step more.  Scales far from 1 are brought closer, x with them, by a power of two.
class Quotient {
 public:
  __device__ explicit Quotient(float scale) {
    power_ = fabsf(scale) < 0x1p-40f ? 0x1p64f : fabsf(scale) > 0x1p40f ? 0x1p-64f : 1.0f;
    scale_ = scale * power_;
    reciprocal_ = __frcp_rn(scale_);
    if (fmaf(-scale_, reciprocal_, 1.0f) <= 0.0f) reciprocal_ = __uint_as_float(__float_as_uint(reciprocal_) - 1);
    // rest = r (e + e^2 + ...); the factor, for the terms left out, matters where the second rounds to a tie.
    const float error = fmaf(-scale_, reciprocal_, 1.0f), first = error * reciprocal_;
    rest_ =
        error > 0.0f ? fmaf(first, error * 0x1.000004p0f, first) : reciprocal_;  // scale 0 or not finite: the latter
  }

  // All of x, in place.  T is the type that they had.
  template <class T, int kSize>
  __device__ void divide(float (&x)[kSize]) const {
    if (power_ != 1.0f) {  // the same for a whole head
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= power_;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float q = fmaf(x[i], reciprocal_, x[i] * rest_);
      if constexpr (sizeof(T) < 4) {
        x[i] = q;
      } else {
        x[i] = fabsf(q) < 0x1p20f ? fmaf(fmaf(-q, scale_, x[i]), reciprocal_, q) : q;
      }
    }
  }

  __device__ uint32_t sign_bytes() const { return scale_ < 0.0f ? 0x80808080u : 0u; }

 private:
  float scale_, power_, reciprocal_, rest_;
};

// Four neighbours of type T (float, half or bf16), as the words they lie in, to four codes, the first in the lowest byte.
//
// Arithmetic on the way may lose the sign of a NaN or of a zero, and it is not said which of its three NaN codes the
// conversion to E5M2 gives: signs are taken from the source's own bits, NaN is put in place.
template <KvFormat kFormat, class T>
__device__ __forceinline__ uint32_t to_fp8x4(const uint32_t (&words)[sizeof(T)], const Quotient& quotient) {
  float x[4];
  uint32_t signs;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]);
    signs = __byte_perm(__byte_perm(words[0], words[1], 0x0073), __byte_perm(words[2], words[3], 0x7300), 0x7610);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 pair = {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u)};
      if constexpr (kDTypeOf<T> == DType::kFloat16) pair = __half22float2(reinterpret_cast<const half2&>(words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
    signs = __byte_perm(words[0], words[1], 0x7531);
  }
  quotient.template divide<T>(x);
  const uint32_t codes_low = __nv_cvt_float2_to_fp8x2({x[0], x[1]}, __NV_SATFINITE, kInterpretation<kFormat>);
  const uint32_t codes_high = __nv_cvt_float2_to_fp8x2({x[2], x[3]}, __NV_SATFINITE, kInterpretation<kFormat>);
  uint32_t codes = (codes_low | codes_high << 16) & 0x7f7f7f7fu;
  if constexpr (kFormat == KvFormat::kE5M2) {
    const uint32_t nan = (codes + 0x04040404u) >> 7 & 0x01010101u;  // from 0x7C on; finite codes end at 0x7B
    codes = (codes & ~nan) | nan << 1;
  }
  return codes | ((signs ^ quotient.sign_bytes()) & 0x80808080u);
}

template <KvFormat kFormat, class T>
__device__ __forceinline__ uint8_t to_fp8(T x, const Quotient& quotient) {
  uint32_t words[sizeof(T)] = {};
  if constexpr (sizeof(T) == 4) {
    words[0] = __float_as_uint(x);
  } else {
    words[0] = reinterpret_cast<const uint16_t&>(x);
  }
  return static_cast<uint8_t>(to_fp8x4<kFormat, T>(words, quotient));
}

}  // namespace pykv
