// mma.sync m16n8k32 of 8-bit elements: int8 with int32 sums since sm_80, float8_e4m3fn with fp32 sums.
//
// Fragments of a lane, with g = lane / 4 and c = lane % 4; a register is four neighbours of a row of A or of a column of B:
//   A[16 x 32]  a0: (g, 4c..)   a1: (g + 8, 4c..)   a2: (g, 4c + 16..)   a3: (g + 8, 4c + 16..)
//   B[32 x 8]   b0: (4c.., g)   b1: (4c + 16.., g)
//   C[16 x 8]   as in cuda/mma.cuh
#pragma once

#include "cuda/mma.cuh"

namespace pykv {

__device__ inline void mma_16x8x32(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// e4m3: the products are kE4M3Unit of what they should be.
#if __CUDA_ARCH__ >= 890
inline constexpr float kE4M3Unit = 1.0f;

__device__ inline void mma_16x8x32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
inline constexpr float kE4M3Unit = 1.0f / 65536.0f;

// Two codes in the lower halves of a word to halves that are 2^-8 of them: the exponent comes to the place of an f16's.
__device__ inline uint32_t e4m3_to_halves(uint32_t codes) {
  const uint32_t magnitude = codes & 0x007f007fu;
  const uint32_t nan = (magnitude + 0x00010001u) & 0x00800080u;
  return (codes & 0x00800080u) << 8 | magnitude << 7 | nan * 0xf8u;
}

// As two products of k16: the order of k within 32 is any, if it is the same for both operands.
__device__ inline void mma_16x8x32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto low = [](uint32_t x) { return e4m3_to_halves(__byte_perm(x, 0, 0x4140)); };
  const auto high = [](uint32_t x) { return e4m3_to_halves(__byte_perm(x, 0, 0x4342)); };
  mma_16x8x16<half>(c, {low(a[0]), low(a[1]), high(a[0]), high(a[1])}, low(b0), high(b0));
  mma_16x8x16<half>(c, {low(a[2]), low(a[3]), high(a[2]), high(a[3])}, low(b1), high(b1));
}
#endif

}  // namespace pykv
