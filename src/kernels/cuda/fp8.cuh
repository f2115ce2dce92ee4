// One-byte floats of the KV cache: E4M3 (largest 448, no infinity) and E5M2 (largest 57344).
//
// stored = value / scale, a true division, rounded to nearest even; infinities and everything too large become the largest
// finite value; NaN becomes 0x7F (E4M3) or 0x7E (E5M2) with its sign.  Loads are exact: every code is a half.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/dtype.h"
#include "cuda/quotient.cuh"
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
