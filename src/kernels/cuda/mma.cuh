// Tensor-core pieces that exist since sm_80: ldmatrix and mma.sync m16n8k16 with fp32 accumulators.
//
// Fragments of a lane, with g = lane / 4 and c = lane % 4:
//   A[16 x 16]  a0: (g, 2c..)   a1: (g + 8, 2c..)   a2: (g, 2c + 8..)   a3: (g + 8, 2c + 8..)
//   B[16 x 8]   b0: (2c.., g)   b1: (2c + 8.., g)
//   C[16 x 8]   c0, c1: (g, 2c..)   c2, c3: (g + 8, 2c..)
#pragma once

#include "cuda/types.cuh"

namespace pykv {

// Loads four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
// Volatile: it keeps its place among barriers, but ordinary accesses to memory may move across it.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Stores 16 bytes, at their places for ldmatrix.
__device__ inline void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// c += a * b
template <class T>
__device__ inline void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void mma_16x8x16<half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma_16x8x16<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as one register of two 16-bit elements, `low` first in memory.
template <class T>
__device__ inline uint32_t pack_pair(float low, float high);

template <>
__device__ inline uint32_t pack_pair<half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ inline uint32_t pack_pair<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <class T>
__device__ inline float2 unpack_pair(uint32_t pair);

template <>
__device__ inline float2 unpack_pair<half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

template <>
__device__ inline float2 unpack_pair<bf16>(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

}  // namespace pykv
