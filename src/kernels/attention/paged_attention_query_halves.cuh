// Queries of dtype bf16 against a cache that holds less: they become halves, each scaled by a power of two.
#pragma once

#include "cuda/mma.cuh"

namespace pykv::attention {

__device__ inline float largest_of(uint32_t pair) {
  const float2 x = unpack_pair<bf16>(pair);
  return fmaxf(fabsf(x.x), fabsf(x.y));
}

// A power of two that brings the largest element to [1, 2), and what scores are to be multiplied by.
struct HalfScale {
  float scale, undo;

  __device__ explicit HalfScale(float largest) {
    const uint32_t bits = __float_as_uint(largest) & 0x7f800000u;
    const bool usual = bits > 0 && bits < 0x7e000000u;
    undo = usual ? __uint_as_float(bits) : 1.f;
    scale = usual ? __uint_as_float(0x7f000000u - bits) : 1.f;
  }

  __device__ uint32_t halves(uint32_t pair) const {
    const float2 x = unpack_pair<bf16>(pair);
    return pack_pair<half>(x.x * scale, x.y * scale);
  }
};

// Eight elements of a row, of which kLanes neighbouring lanes have as many each, become halves.  Gives what scores are to be
// multiplied by.
template <int kLanes>
__device__ inline float halve_chunk(uint4& x) {
  float largest = fmaxf(fmaxf(largest_of(x.x), largest_of(x.y)), fmaxf(largest_of(x.z), largest_of(x.w)));
  for (int m = 1; m < kLanes; m *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
  const HalfScale by(largest);
  x = {by.halves(x.x), by.halves(x.y), by.halves(x.z), by.halves(x.w)};
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
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place(chunk)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
}

}  // namespace pykv::attention
