// Matrix products of TF32, fp32 of which 11 bits count: of a warpgroup (sm_90a), D[64 x N] += A[64 x 8] B[8 x N], and of a warp.
//
// A lies in registers.  Of a lane, with g = lane / 4 and c = lane % 4: a0: (g, c)   a1: (g + 8, c)   a2: (g, c + 4)   a3: (g + 8, c + 4),
// of the 16 rows of its warp.  Accumulators and fences are those of cuda/wgmma.cuh.
#pragma once

#include "cuda/wgmma.cuh"

namespace pykv {

// What counts of x, and the rest, of which 11 bits count.
__device__ inline float tf32_of(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// B in shared memory, not swizzled: four neighbours along the sum of each column, 16 bytes after those of the column before;
// the next four lie `four` bytes further on.
__device__ inline uint64_t tf32_matrix(uint32_t address, uint32_t four) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(four >> 4) << 16 |
         static_cast<uint64_t>(128 >> 4) << 32;
}

// c += a * b, for the eight columns of a warp: b0: (c, g)   b1: (c + 4, g)
__device__ inline void mma_16x8x8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a * b
template <int kColumns>
__device__ void wgmma_tf32(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b);

#define PYKV_EIGHT_OF(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PYKV_SUMS_64 PYKV_EIGHT_OF(0), PYKV_EIGHT_OF(8), PYKV_EIGHT_OF(16), PYKV_EIGHT_OF(24)
#define PYKV_SUMS_128 PYKV_SUMS_64, PYKV_EIGHT_OF(32), PYKV_EIGHT_OF(40), PYKV_EIGHT_OF(48), PYKV_EIGHT_OF(56)
#define PYKV_NAMES_64                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23," \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define PYKV_NAMES_128                                                                           \
  PYKV_NAMES_64                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define PYKV_WGMMA_TF32(N, P0, P1, P2, P3, P4)                                                  \
  template <>                                                                                   \
  __device__ inline void wgmma_tf32<N>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" PYKV_NAMES_##N     \
                 "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", 1, 1, 1;"                        \
                 : PYKV_SUMS_##N                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }

PYKV_WGMMA_TF32(64, "%32", "%33", "%34", "%35", "%36")
PYKV_WGMMA_TF32(128, "%64", "%65", "%66", "%67", "%68")

#undef PYKV_WGMMA_TF32
#undef PYKV_EIGHT_OF
#undef PYKV_SUMS_64
#undef PYKV_SUMS_128
#undef PYKV_NAMES_64
#undef PYKV_NAMES_128

}  // namespace pykv
