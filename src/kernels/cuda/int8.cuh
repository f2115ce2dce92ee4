// int8 of the KV cache: stored = value / scale, a true division, rounded to nearest even, saturated to -128 ... 127; NaN
// becomes 0.  Loads are exact: every code is a half.
#pragma once

#include <cstdint>

#include "cuda/quotient.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// Four neighbours of type T (float, half or bf16), as the words they lie in, to four codes, the first in the lowest byte.
template <class T>
__device__ __forceinline__ uint32_t to_int8x4(const uint32_t (&words)[sizeof(T)], const Quotient& quotient) {
  float x[4];
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = word_to_floats<T>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  quotient.template divide<T>(x);
  int rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded[i] = __float2int_rn(x[i]);  // saturates; NaN: 0
  uint32_t codes;
  asm("{\n\t.reg .b32 high;\n\t"
      "cvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n\t"
      "cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n\t}"
      : "=r"(codes)
      : "r"(rounded[0]), "r"(rounded[1]), "r"(rounded[2]), "r"(rounded[3]));
  return codes;
}

// Four codes, the first in the lowest byte.  Each becomes the lowest byte of a number with a known exponent.
__device__ __forceinline__ void int8x4_to_half2x2(uint32_t codes, half2& low, half2& high) {
  const uint32_t shifted = codes ^ 0x80808080u;  // code + 128
  const uint32_t words[2] = {__byte_perm(shifted, 0x64646464u, 0x5150), __byte_perm(shifted, 0x64646464u, 0x5352)};
  const half2 offset = __halves2half2(__ushort_as_half(0x6480), __ushort_as_half(0x6480));  // 1024 + 128
  low = __hsub2(reinterpret_cast<const half2&>(words[0]), offset);
  high = __hsub2(reinterpret_cast<const half2&>(words[1]), offset);
}

__device__ __forceinline__ void int8x4_to_floats(uint32_t codes, float (&x)[4]) {
  const uint32_t shifted = codes ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[i] = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7440 + i)) - 8388736.0f;  // 2^23 + 128
}

__device__ __forceinline__ float int8_to_float(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }

}  // namespace pykv
