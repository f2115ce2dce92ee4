// Several elements as one memory access, and their conversions to and from float.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/args.h"
#include "cuda/types.cuh"

namespace pykv {

// Whether elements are held as the words they came in.  Taken apart at once, they would make the thread wait for each
// load before it starts the next.
template <class T, int kSize>
inline constexpr bool kInWords = sizeof(T) < 4 && sizeof(T) * kSize % 4 == 0;

// kSize elements that move as one access of up to 16 bytes.
template <class T, int kSize, bool = kInWords<T, kSize>>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vec {
  T elements[kSize];
  __device__ T& operator[](int i) { return elements[i]; }
  __device__ const T& operator[](int i) const { return elements[i]; }
};

template <class T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vec<T, kSize, true> {
  static constexpr int kPerWord = 4 / sizeof(T);
  uint32_t words[kSize / kPerWord];
  __device__ T operator[](int i) const {
    T v;
    const uint32_t bits = words[i / kPerWord] >> (i % kPerWord * 8 * sizeof(T));
    __builtin_memcpy(&v, &bits, sizeof v);  // the lowest bytes
    return v;
  }
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

// Whether every row of an array starts at a multiple of `bytes`.
inline bool rows_aligned(int64_t bytes, const void* data, const Rows& rows, int64_t size) {
  return is_aligned(bytes, data, {rows.stride0 * size, rows.stride1 * size, rows.stride2 * size});
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

// The two elements of a word.
template <class T>
__device__ float2 word_to_floats(uint32_t word);
template <>
__device__ inline float2 word_to_floats<half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const half2*>(&word));
}
template <>
__device__ inline float2 word_to_floats<bf16>(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
template <class T>
__device__ uint32_t word_from_floats(float low, float high);
template <>
__device__ inline uint32_t word_from_floats<half>(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t word_from_floats<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class T, int kSize>
__device__ Vec<float, kSize> to_floats(const Vec<T, kSize>& v) {
  Vec<float, kSize> floats;
  if constexpr (kInWords<T, kSize>) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float2 pair = word_to_floats<T>(v.words[i]);
      floats[2 * i] = pair.x;
      floats[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) floats[i] = to_float(v[i]);
  }
  return floats;
}

template <class T, int kSize>
__device__ Vec<T, kSize> round_to(const Vec<float, kSize>& floats) {
  Vec<T, kSize> v;
  if constexpr (kInWords<T, kSize>) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) v.words[i] = word_from_floats<T>(floats[2 * i], floats[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = from_float<T>(floats[i]);
  }
  return v;
}

// Every element `value`.
template <class T, int kSize>
__device__ Vec<T, kSize> filled(float value) {
  Vec<float, kSize> floats;
#pragma unroll
  for (int i = 0; i < kSize; ++i) floats[i] = value;
  return round_to<T>(floats);
}

// Aligned accesses to global memory.
template <class V, class T>
__device__ V load_vec(const T* from) {
  return *reinterpret_cast<const V*>(from);
}
// Where it is written, which keeps all loads of a thread in flight at once.  Not past L1: with L1::no_allocate kernels that
// read more than they write took a tenth longer on an H200.
template <class V, class T>
__device__ V load_vec_in_order(const T* from) {
  if constexpr (sizeof(V) == 16) {
    uint4 raw;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(from));
    V v;
    __builtin_memcpy(&v, &raw, sizeof v);
    return v;
  } else {
    return load_vec<V>(from);
  }
}
// Spelled out, since the compiler may take the copy of a struct apart.
template <class V, class T>
__device__ void store_vec(T* to, const V& v) {
  if constexpr (sizeof(V) == 16) {
    uint4 raw;
    __builtin_memcpy(&raw, &v, sizeof v);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
                 : "memory");
  } else if constexpr (sizeof(V) == 8) {
    uint2 raw;
    __builtin_memcpy(&raw, &v, sizeof v);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(raw.x), "r"(raw.y) : "memory");
  } else {
    *reinterpret_cast<V*>(to) = v;
  }
}

// The first `count` elements, one by one, whatever the alignment; the others are 0.
template <class V, class T>
__device__ V load_some(const T* from, int count) {
  constexpr int kSize = sizeof(V) / sizeof(T);
  T elements[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) elements[i] = i < count ? from[i] : T{};
  V v;
  __builtin_memcpy(&v, elements, sizeof v);
  return v;
}
template <class T, int kSize>
__device__ void store_some(T* to, const Vec<T, kSize>& v, int count) {
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    if (i < count) to[i] = v[i];
}

}  // namespace pykv
