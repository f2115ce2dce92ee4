// Matrix products of a warpgroup (sm_90a): D[64 x N] += A[64 x 16] B[16 x N], fp32 accumulators, 16-bit A and B.
//
// Accumulators of a lane, with warp w of the four, g = lane / 4 and c = lane % 4: element 4 n + 2 h + e of D lies at row
// 16 w + 8 h + g, column 8 n + 2 c + e.  A from registers is each warp's fragment of mma.sync (cuda/mma.cuh).
//
// Matrices in shared memory have lines of 128 bytes, eight of which are 1024 aligned bytes; the 16-byte chunk c of line i
// lies at place c XOR i % 8.  The products run asynchronously: registers that they read or write are out of bounds from
// wgmma_begin until wgmma_wait says that their group has ended.
#pragma once

#include <cstdint>

#include "cuda/types.cuh"

namespace pykv {

// Lines along the sum (kAlong): 64 elements of a row of A or of a column of B each; eight of them lie `eight` bytes apart.
// Lines across the sum: 64 columns of one of the 16 rows of B, or 64 rows of one of the 16 columns of A; eight lines lie
// `eight` bytes apart, the next 64 columns `next` bytes.
__device__ inline uint64_t wgmma_matrix(uint32_t address, uint32_t eight, uint32_t next = 16) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(next >> 4) << 16 |
         static_cast<uint64_t>(eight >> 4) << 32 | uint64_t{1} << 62;
}

// The same `bytes` further on: in 32 bits, which the uniform registers that hold it add in one step.
__device__ inline uint64_t wgmma_further(uint64_t matrix, uint32_t bytes) {
  return (matrix & 0xffffffff00000000) | (static_cast<uint32_t>(matrix) + (bytes >> 4));
}

__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to these registers across this point.
template <int kCount>
__device__ inline void wgmma_pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int kParts, int kCount>
__device__ inline void wgmma_pin(float (&x)[kParts][kCount]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) wgmma_pin(x[i]);
}

// A warpgroup's share of the registers of its block's threads.
template <int kBudget>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kBudget));
}
template <int kBudget>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBudget));
}

// Stores four 8 x 8 matrices of 16-bit elements from fragments; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores 8 x 8 matrices of 16-bit elements from fragments, transposed.
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}
__device__ inline void store_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

enum WgmmaLines { kAlong = 0, kAcross = 1 };

// The registers of 16, 32, 64, 128 and 256 columns, as operands and in the instruction.
#define PYKV_EIGHT_OF(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PYKV_SUMS_16 PYKV_EIGHT_OF(0)
#define PYKV_SIXTEEN_OF(i) PYKV_EIGHT_OF(i), PYKV_EIGHT_OF(i + 8)
#define PYKV_SUMS_32 PYKV_SIXTEEN_OF(0)
#define PYKV_SUMS_64 PYKV_SUMS_32, PYKV_SIXTEEN_OF(16)
#define PYKV_SUMS_128 PYKV_SUMS_64, PYKV_SIXTEEN_OF(32), PYKV_SIXTEEN_OF(48)
#define PYKV_SUMS_256 PYKV_SUMS_128, PYKV_SIXTEEN_OF(64), PYKV_SIXTEEN_OF(80), PYKV_SIXTEEN_OF(96), PYKV_SIXTEEN_OF(112)
#define PYKV_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PYKV_NAMES_32 PYKV_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PYKV_NAMES_64 PYKV_NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PYKV_NAMES_128                                                                           \
  PYKV_NAMES_64                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PYKV_NAMES_256                                                                               \
  PYKV_NAMES_128                                                                                     \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "     \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The instructions for kColumns of D; `add` 0 starts the sums anew.
//   ss  A and B from shared memory
//   rs  A from registers
template <class T, int kColumns>
struct Wgmma;

// N: columns.  P0 to P6: the operands after the sums, which the instruction knows by number alone.
#define PYKV_WGMMA(T, TYPE, N, P0, P1, P2, P3, P4, P5, P6)                                                         \
  template <>                                                                                                      \
  struct Wgmma<T, N> {                                                                                             \
    template <int kLinesA = kAlong, int kLinesB = kAlong>                                                          \
    static __device__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                   "." TYPE " {" PYKV_NAMES_##N "}, " P0 ", " P1 ", p, 1, 1, " P3 ", " P4 ";}"                     \
                   : PYKV_SUMS_##N                                                                                 \
                   : "l"(a), "l"(b), "r"(add), "n"(kLinesA), "n"(kLinesB));                                        \
    }                                                                                                              \
    template <int kLines>                                                                                          \
    static __device__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {                    \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                   "." TYPE " {" PYKV_NAMES_##N "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, " P6 ";}"   \
                   : PYKV_SUMS_##N                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kLines));                   \
    }                                                                                                              \
  };
#define PYKV_WGMMAS(T, TYPE)                                                \
  PYKV_WGMMA(T, TYPE, 16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")    \
  PYKV_WGMMA(T, TYPE, 32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")  \
  PYKV_WGMMA(T, TYPE, 64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")  \
  PYKV_WGMMA(T, TYPE, 128, "%64", "%65", "%66", "%67", "%68", "%69", "%70") \
  PYKV_WGMMA(T, TYPE, 256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

PYKV_WGMMAS(half, "f16")
PYKV_WGMMAS(bf16, "bf16")

#undef PYKV_WGMMAS
#undef PYKV_WGMMA
#undef PYKV_NAMES_16
#undef PYKV_NAMES_32
#undef PYKV_NAMES_64
#undef PYKV_NAMES_128
#undef PYKV_NAMES_256
#undef PYKV_EIGHT_OF
#undef PYKV_SIXTEEN_OF
#undef PYKV_SUMS_16
#undef PYKV_SUMS_32
#undef PYKV_SUMS_64
#undef PYKV_SUMS_128
#undef PYKV_SUMS_256

}  // namespace pykv
