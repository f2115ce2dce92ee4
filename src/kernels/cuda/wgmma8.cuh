// Matrix products of a warpgroup (sm_90a) of 8-bit elements: D[64 x N] += A[64 x 32] B[32 x N], A and B in shared memory.
//
// float8_e4m3fn with fp32 sums, which keep fewer bits than fp32 has; int8 with int32 sums, exact.  Lines of both matrices lie
// along the sum, 128 elements each; layouts, fences and accumulators are those of cuda/wgmma.cuh.
#pragma once

#include "cuda/wgmma.cuh"

namespace pykv {

template <int kCount>
__device__ inline void wgmma_pin(int32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// The instruction for kColumns of D; `add` 0 starts the sums anew.
template <class Sum, int kColumns>
struct Wgmma8;

#define PYKV_EIGHT(C, i) \
  C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define PYKV_SIXTEEN(C, i) PYKV_EIGHT(C, i), PYKV_EIGHT(C, i + 8)
#define PYKV_SUMS_16(C) PYKV_EIGHT(C, 0)
#define PYKV_SUMS_32(C) PYKV_SIXTEEN(C, 0)
#define PYKV_SUMS_64(C) PYKV_SUMS_32(C), PYKV_SIXTEEN(C, 16)
#define PYKV_SUMS_112(C) PYKV_SUMS_64(C), PYKV_SIXTEEN(C, 32), PYKV_EIGHT(C, 48)
#define PYKV_SUMS_128(C) PYKV_SUMS_64(C), PYKV_SIXTEEN(C, 32), PYKV_SIXTEEN(C, 48)
#define PYKV_SUMS_256(C) \
  PYKV_SUMS_128(C), PYKV_SIXTEEN(C, 64), PYKV_SIXTEEN(C, 80), PYKV_SIXTEEN(C, 96), PYKV_SIXTEEN(C, 112)
#define PYKV_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PYKV_NAMES_32 PYKV_NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PYKV_NAMES_64 \
  PYKV_NAMES_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PYKV_NAMES_112                                                               \
  PYKV_NAMES_64                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PYKV_NAMES_128                                                               \
  PYKV_NAMES_64                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PYKV_NAMES_256                                                                           \
  PYKV_NAMES_128                                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// N: columns.  P0 to P2: the operands after the sums, which the instruction knows by number alone.
#define PYKV_WGMMA8(SUM, C, N, TYPE, P0, P1, P2, SIGNS)                                                        \
  template <>                                                                                                  \
  struct Wgmma8<SUM, N> {                                                                                      \
    static __device__ void ss(SUM (&d)[N / 2], uint64_t a, uint64_t b, int add) {                              \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPE \
                   " {" PYKV_NAMES_##N "}, " P0 ", " P1 ", p" SIGNS ";}"                                       \
                   : PYKV_SUMS_##N(C)                                                                          \
                   : "l"(a), "l"(b), "r"(add));                                                                \
    }                                                                                                          \
  };
#define PYKV_WGMMA8S(N, P0, P1, P2)                                  \
  PYKV_WGMMA8(float, "+f", N, "f32.e4m3.e4m3", P0, P1, P2, ", 1, 1") \
  PYKV_WGMMA8(int32_t, "+r", N, "s32.s8.s8", P0, P1, P2, "")

PYKV_WGMMA8S(16, "%8", "%9", "%10")
PYKV_WGMMA8S(32, "%16", "%17", "%18")
PYKV_WGMMA8S(64, "%32", "%33", "%34")
PYKV_WGMMA8(float, "+f", 112, "f32.e4m3.e4m3", "%56", "%57", "%58", ", 1, 1")
PYKV_WGMMA8S(128, "%64", "%65", "%66")
PYKV_WGMMA8S(256, "%128", "%129", "%130")

#undef PYKV_WGMMA8S
#undef PYKV_WGMMA8
#undef PYKV_NAMES_16
#undef PYKV_NAMES_32
#undef PYKV_NAMES_64
#undef PYKV_NAMES_112
#undef PYKV_NAMES_128
#undef PYKV_NAMES_256
#undef PYKV_SUMS_16
#undef PYKV_SUMS_32
#undef PYKV_SUMS_64
#undef PYKV_SUMS_112
#undef PYKV_SUMS_128
#undef PYKV_SUMS_256
#undef PYKV_SIXTEEN
#undef PYKV_EIGHT

}  // namespace pykv
