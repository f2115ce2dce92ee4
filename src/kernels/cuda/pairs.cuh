// Two 16-bit numbers at once, as the word they lie in: half the instructions of what is done in float, where the result
// is the same.
#pragma once

#include <type_traits>

#include "cuda/vec.cuh"

namespace pykv {

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, half>, half2, __nv_bfloat162>;

template <class T>
__device__ Pair<T> as_pair(uint32_t word) {
  return reinterpret_cast<const Pair<T>&>(word);
}
template <class P>
__device__ uint32_t as_word(const P& pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}

// Rounded to T, as a product of floats rounded further is.
template <class T>
__device__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return as_word(__hmul2_rn(as_pair<T>(a), as_pair<T>(b)));
}
// The same numbers, but 0 for -0.
template <class T>
__device__ uint32_t plus_zero(uint32_t a) {
  return as_word(__hadd2_rn(as_pair<T>(a), as_pair<T>(0u)));
}
// The larger ones of magnitudes; NaN is passed over.  The signs of the result mean nothing.
template <class T>
__device__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t most;
  if constexpr (std::is_same_v<T, half>) {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  }
  return most;
#else
  return as_word(__hmax2(__habs2(as_pair<T>(a)), __habs2(as_pair<T>(b))));
#endif
}
// The same, NaN where one is; of floats one.
template <class T>
__device__ uint32_t larger_magnitudes_or_nan(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t most;
  if constexpr (std::is_same_v<T, half>) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  } else if constexpr (std::is_same_v<T, float>) {
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  }
  return most;
#else
  if constexpr (std::is_same_v<T, float>) {
    return max(a & 0x7fffffffu, b & 0x7fffffffu);
  } else {
    return as_word(__hmax2_nan(__habs2(as_pair<T>(a)), __habs2(as_pair<T>(b))));
  }
#endif
}
// NaN becomes infinity.
template <class T>
__device__ uint32_t nan_to_infinity(uint32_t a) {
  constexpr uint32_t kInfinities = std::is_same_v<T, half> ? 0x7c007c00u : 0x7f807f80u;
  return as_word(__hmin2(as_pair<T>(a), as_pair<T>(kInfinities)));
}

}  // namespace pykv
