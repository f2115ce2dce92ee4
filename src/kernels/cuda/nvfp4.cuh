// Blocks of nvfp4 (core/nvfp4.h) read without the conversion instructions that only later chips have.
#pragma once

#include <cstdint>

#include "core/nvfp4.h"
#include "cuda/fp8.cuh"

namespace pykv {

// Sixteen elements: code i in bits 4i and following.
struct Nvfp4Codes {
  uint2 codes;
  uint8_t scale;
};

// Eight codes as halves, two neighbours a word.  Of these halves only the higher byte is not 0: it is looked up among eight.
__device__ __forceinline__ void e2m1x8_to_halves(uint32_t codes, uint32_t (&halves)[4]) {
  const uint32_t magnitudes = codes & 0x77777777u, evens = codes << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bytes = __byte_perm(0x3e3c3800u, 0x46444240u, magnitudes >> (16 * i));  // 0 0.5 1 1.5, 2 3 4 6
    const uint32_t signs = __byte_perm(evens, codes, i == 0 ? 0x5140 : 0x7362);            // bit 7 of each byte
    const uint32_t high = bytes | (signs & 0x80808080u);
    halves[2 * i] = __byte_perm(high, 0, 0x1404);
    halves[2 * i + 1] = __byte_perm(high, 0, 0x3424);
  }
}

// Eight codes as the upper bytes of halves, in units of kE2m1Unit: evens[i] of element 2i, odds[i] of the one behind it.  A code's
// exponent and its one bit of fraction are the lowest of the byte's but one, so that 0.5 is a half below the least normal one.
constexpr float kE2m1Unit = 0x1p-14f;
__device__ __forceinline__ void e2m1x8_to_high_bytes(uint32_t codes, uint32_t& evens, uint32_t& odds) {
  evens = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
  odds = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
}

// Eight codes times the scale of their block: exact.
__device__ __forceinline__ void nvfp4x8_to_half2x4(uint32_t codes, uint8_t scale, half2 (&values)[4]) {
  const half2 scales = fp8x2_to_half2<KvFormat::kE4M3>(static_cast<uint16_t>(scale * 0x0101u));
  uint32_t halves[4];
  e2m1x8_to_halves(codes, halves);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __hmul2(reinterpret_cast<const half2&>(halves[i]), scales);
}

}  // namespace pykv
