// Several elements as one memory access, and their conversions to and from float.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "cuda/types.cuh"

namespace pykv {

// kSize elements that move as one access of up to 16 bytes.
template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vec {
  T elements[kSize];
  __device__ T& operator[](int i) { return elements[i]; }
  __device__ const T& operator[](int i) const { return elements[i]; }
};

// The widest access there is on every chip we build for.
inline constexpr int kAccessBytes = 16;
template <class T>
inline constexpr int kPackSize = kAccessBytes / static_cast<int>(sizeof(T));
template <class T>
using Pack = Vec<T, kPackSize<T>>;

// Whether an address and all these strides (bytes) are multiples of `bytes`, so that accesses of that width are
// aligned.
inline bool is_aligned(int64_t bytes, const void* address, std::initializer_list<int64_t> strides = {}) {
  int64_t bits = static_cast<int64_t>(reinterpret_cast<intptr_t>(address));
  for (int64_t stride : strides) bits |= stride;
  return (bits & (bytes - 1)) == 0;
}

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(half v) { return __half2float(v); }
__device__ inline float to_float(bf16 v) { return __bfloat162float(v); }

// Rounds to nearest even.
template <class T>
__device__ T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline half from_float<half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline bf16 from_float<bf16>(float v) {
  return __float2bfloat16_rn(v);
}

// Two at a time: one instruction where the type is 16 bits wide.
__device__ inline void from_floats(float a, float b, float* to) {
  to[0] = a;
  to[1] = b;
}
__device__ inline void from_floats(float a, float b, half* to) {
  *reinterpret_cast<half2*>(to) = __floats2half2_rn(a, b);
}
__device__ inline void from_floats(float a, float b, bf16* to) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

template <class T, int kSize>
__device__ Vec<float, kSize> to_floats(const Vec<T, kSize>& v) {
  Vec<float, kSize> floats;
#pragma unroll
  for (int i = 0; i < kSize; ++i) floats[i] = to_float(v[i]);
  return floats;
}

template <class T, int kSize>
__device__ Vec<T, kSize> round_to(const Vec<float, kSize>& floats) {
  Vec<T, kSize> v;
  if constexpr (kSize == 1) {
    v[0] = from_float<T>(floats[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) from_floats(floats[i], floats[i + 1], v.elements + i);
  }
  return v;
}

// Aligned accesses.  A streamed one passes by L1: data that is used once should not push out what is shared (weights).
template <class V, class T>
__device__ V load_vec(const T* from) {
  return *reinterpret_cast<const V*>(from);
}
template <class V, class T>
__device__ V load_vec_streamed(const T* from) {
  V v;
  if constexpr (sizeof(V) == 16) {
    uint32_t* r = reinterpret_cast<uint32_t*>(&v);
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "l"(from));
  } else {
    v = load_vec<V>(from);
  }
  return v;
}
template <class V, class T>
__device__ void store_vec(T* to, const V& v) {
  *reinterpret_cast<V*>(to) = v;
}

// The first `count` elements, one by one, whatever the alignment; the others are `rest`.
template <class V, class T>
__device__ V load_some(const T* from, int64_t count, T rest) {
  V v;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(T)); ++i) v[i] = i < count ? from[i] : rest;
  return v;
}
template <class V, class T>
__device__ void store_some(T* to, const V& v, int64_t count) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(T)); ++i)
    if (i < count) to[i] = v[i];
}

}  // namespace pykv
