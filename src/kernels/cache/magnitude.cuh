// The largest magnitude of the elements that a lane holds, pairs of 16-bit floats as they are.  NaN is not counted.
#pragma once

#include "cuda/quotient.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// The larger ones of two words of magnitudes; NaN only against NaN.
template <class T>
__device__ uint32_t larger(uint32_t a, uint32_t b);
template <>
__device__ inline uint32_t larger<float>(uint32_t a, uint32_t b) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
template <>
__device__ inline uint32_t larger<half>(uint32_t a, uint32_t b) {
  const half2 v = __hmax2(reinterpret_cast<const half2&>(a), reinterpret_cast<const half2&>(b));
  return reinterpret_cast<const uint32_t&>(v);
}
template <>
__device__ inline uint32_t larger<bf16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 v =
      __hmax2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(v);
}

// A word of the largest, for lanes to share by larger().
template <class T, int kSize, int kVectors>
__device__ __forceinline__ uint32_t largest_word(const Vec<T, kSize> (&vectors)[kVectors]) {
  constexpr int kWords = kSize * sizeof(T) / 4;
  constexpr uint32_t kNoSign = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;
  uint32_t most = 0;
#pragma unroll
  for (const auto& v : vectors) {
    uint32_t words[kWords];
    __builtin_memcpy(words, &v, sizeof words);
#pragma unroll
    for (uint32_t word : words) most = larger<T>(most, word & kNoSign);
  }
  return most;
}

template <class T>
__device__ inline float largest_in_word(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word);
  } else {
    const float2 pair = word_to_floats<T>(word);
    return fmaxf(pair.x, pair.y);
  }
}

// The smallest power of two that is not below a positive, normal scale: a carry out of the mantissa, unless that is 0.
// Infinity stays what it is.
__device__ __forceinline__ float power_of_two_from(float scale) {
  return __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u);
}

// magnitude / 448, rounded as a division is (where the result is a normal number, and the magnitude finite).
__device__ __forceinline__ float fp8_unit(float magnitude) {
  constexpr float kLargest = 448.0f, kReciprocal = 1.0f / kLargest;
  return corrected(magnitude * kReciprocal, magnitude, kLargest, kReciprocal);
}

}  // namespace pykv
