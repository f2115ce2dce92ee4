// nvfp4 codes on CUDA: a code of four bits times its scale of eight is exact in 16 bits.
#pragma once

#include "cuda/fp8.cuh"

namespace pykv {

constexpr float kFp4Unit = 16384.0f;  // 2^14: what products of two decoded numbers lack

// A scale of e4m3, for decode_fp4.
__device__ inline half2 fp4_scale(uint32_t byte) {
  return __hmul2(__low2half2(fp8x2_to_half2<KvFormat::kE4M3>(static_cast<uint16_t>(byte))), __float2half2_rn(128.0f));
}

// The pair of codes i and 4 + i of the eight in a word, times their scale: 2^-7 of what they should be.
__device__ inline uint32_t decode_fp4(uint32_t word, int i, half2 scale) {
  const uint32_t signs = word << (12 - 4 * i), numbers = i == 3 ? word >> 3 : word << (9 - 4 * i);
  const uint32_t bits = (signs & 0x80008000u) | (numbers & 0x0e000e00u);  // 2^-14 of the numbers
  const half2 pair = __hmul2(reinterpret_cast<const half2&>(bits), scale);
  return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace pykv
