// Sixteen numbers as four-bit floats (e2m1) without the conversion instructions that only later chips have.
//
// e2m1 is uniform in three pieces, with code = 2 y below 2, y + 2 below 4 and y / 2 + 4 from there: the magnitude's code is
// the least of these three lines, each rounded by one fused multiplication and addition to a large number, whose lowest
// bits are then the code.
#pragma once

#include <cstdint>

#include "cuda/vec.cuh"

namespace pykv {

inline constexpr int kE2m1AtOnce = 16;

// The words of so many neighbours of type T (float, half or bf16).
template <class T>
using E2m1Words = const uint32_t (&)[4 * sizeof(T)];

// y = |x| r
template <class T>
__device__ __forceinline__ void e2m1_multiply(E2m1Words<T> words, float r, float (&y)[kE2m1AtOnce]) {
  constexpr int kWords = 4 * sizeof(T);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      y[i] = __fmul_rn(fabsf(__uint_as_float(words[i])), r);
    } else {
      const float2 pair = word_to_floats<T>(words[i]);
      y[2 * i] = __fmul_rn(fabsf(pair.x), r);
      y[2 * i + 1] = __fmul_rn(fabsf(pair.y), r);
    }
  }
}

// The highest bit of each byte that a selector names, as that byte.
template <uint32_t kBytes>
__device__ uint32_t sign_bytes_of(uint32_t a, uint32_t b) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(kBytes | 0x8888u));
  return bytes;
}

// The signs of elements 8 kHalf and following, in bits 3, 7, ...
template <class T, int kHalf>
__device__ __forceinline__ uint32_t e2m1_signs(E2m1Words<T> words) {
  uint32_t low, high;  // the highest bytes of elements 0, 2, 1 and 3, and of the four behind them
  if constexpr (sizeof(T) == 4) {
    const uint32_t* w = words + 8 * kHalf;
    low = __byte_perm(__byte_perm(w[0], w[2], 0x0073), __byte_perm(w[1], w[3], 0x0073), 0x5410);
    high = __byte_perm(__byte_perm(w[4], w[6], 0x0073), __byte_perm(w[5], w[7], 0x0073), 0x5410);
  } else {
    const uint32_t* w = words + 4 * kHalf;
    low = __byte_perm(w[0], w[1], 0x7351);
    high = __byte_perm(w[2], w[3], 0x7351);
  }
  const uint32_t even = sign_bytes_of<0x5410>(low, high), odd = __byte_perm(low, high, 0x7632);
  return (even & 0x08080808u) | (odd & 0x80808080u);
}

// Codes with the signs of `words`, the first one in the lowest bits, for 0 <= y < 7.
template <class T>
__device__ __forceinline__ uint2 e2m1_codes(E2m1Words<T> words, const float (&y)[kE2m1AtOnce]) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  constexpr uint32_t kRoundBits = 0x4b400000u;
  constexpr uint32_t kExtra = kRoundBits * 0x11111111u;  // what eight codes carry beside themselves
  // The code in the lowest bits of kRoundBits.  Positive floats are in the order of their bits; from sm_90 on the least of three
  // is one instruction.
  const auto magnitude_bits = [](float v) {
    return __vimin3_u32(__float_as_uint(__fmaf_rn(v, 2.0f, kRound)), __float_as_uint(__fadd_rn(v, kRound + 2.0f)),
                        __float_as_uint(__fmaf_rn(v, 0.5f, kRound + 4.0f)));
  };
  uint32_t packed[2] = {0, 0};
#pragma unroll
  for (int i = kE2m1AtOnce - 1; i >= 0; --i) packed[i / 8] = packed[i / 8] * 16 + magnitude_bits(y[i]);
  return {(packed[0] - kExtra) | e2m1_signs<T, 0>(words), (packed[1] - kExtra) | e2m1_signs<T, 1>(words)};
}

}  // namespace pykv
