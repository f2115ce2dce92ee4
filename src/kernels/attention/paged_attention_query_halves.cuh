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

}  // namespace pykv::attention
