// Queries of dtype bf16 against a cache that holds less: they become halves, scaled by a power of two, each row or several alike.
#pragma once

#include "cuda/mma.cuh"

namespace pykv::attention {

__device__ inline float largest_of(uint32_t pair) {
  const float2 x = unpack_pair<bf16>(pair);
  return fmaxf(fabsf(x.x), fabsf(x.y));
}

__device__ inline float largest_of(uint4 x) {
  return fmaxf(fmaxf(largest_of(x.x), largest_of(x.y)), fmaxf(largest_of(x.z), largest_of(x.w)));
}

// A power of two that brings the largest element to [1, 2), and what scores are to be multiplied by.
struct HalfScale {
  float scale, undo;

  __device__ explicit HalfScale(float largest) {
    const uint32_t bits = exponent_of(largest);
    undo = bits > 0 ? __uint_as_float(bits) : 1.f;
    scale = bits > 0 ? __uint_as_float(0x7f000000u - bits) : 1.f;
  }

  // In its place, or 0 if it is none that such a scale is made of.
  static __device__ uint32_t exponent_of(float largest) {
    const uint32_t bits = __float_as_uint(largest) & 0x7f800000u;
    return bits < 0x7e000000u ? bits : 0;
  }

  __device__ uint32_t halves(uint32_t pair) const {
    const float2 x = unpack_pair<bf16>(pair);
    return pack_pair<half>(x.x * scale, x.y * scale);
  }
  __device__ uint4 halves(uint4 x) const { return {halves(x.x), halves(x.y), halves(x.z), halves(x.w)}; }
};

// One for several rows, found by each warp from their largest elements: it brings the largest of all to [4096, 8192).
struct CommonHalfScale {
  HalfScale by;
  bool suits;  // steps of each row's halves are at most 2^-20 of its largest element

  __device__ CommonHalfScale(const float* largest, int rows) : by(0.f) {  // by one
    constexpr uint32_t kOne = 1u << 23, kRoom = 12 * kOne, kMost = 16 * kOne;
    uint32_t high = 0, low = ~0u;
    for (int r = threadIdx.x % 32; r < rows; r += 32) {
      const uint32_t bits = HalfScale::exponent_of(largest[r]);
      high = max(high, bits);
      if (bits > 0) low = min(low, bits);
    }
    high = __reduce_max_sync(~0u, high);
    low = __reduce_min_sync(~0u, low);
    suits = high == 0 || (high > kRoom && high - low <= kMost);
    if (suits && high > 0) by = HalfScale(__uint_as_float(high - kRoom));
  }
};

// Of a row, of which kLanes neighbouring lanes have eight elements each.
template <int kLanes>
__device__ inline float largest_of_row(uint4 x) {
  float largest = largest_of(x);
  for (int m = 1; m < kLanes; m *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
  return largest;
}

// These eight elements become halves.  Gives what scores are to be multiplied by.
template <int kLanes>
__device__ inline float halve_chunk(uint4& x) {
  const HalfScale by(largest_of_row<kLanes>(x));
  x = by.halves(x);
  return by.undo;
}

// Stores eight dimensions of a query; place(c): shared address of the c-th eight of its row.  Permuted, as elements of one byte
// want them: dimensions 4c .. 4c + 3 of 16 at places 2c, 2c + 1, 2c + 8, 2c + 9.
template <bool kPermuted>
__device__ inline void store_query_chunk(uint4 x, int chunk, auto&& place) {
  if constexpr (kPermuted) {
    const uint32_t even = place(chunk & ~1) + (chunk & 1) * 8, odd = place(chunk | 1) + (chunk & 1) * 8;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(even), "r"(x.x), "r"(x.z) : "memory");
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(odd), "r"(x.y), "r"(x.w) : "memory");
  } else {
    store_shared(place(chunk), x);
  }
}

}  // namespace pykv::attention
