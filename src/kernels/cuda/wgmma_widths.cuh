// Matrix products of a warpgroup (cuda/wgmma.cuh) of further widths: 8, 48, 96, 144 and 192 columns, A and B from shared memory.
#pragma once

#include "cuda/wgmma.cuh"

namespace pykv {

#define PYKV_EIGHT_OF(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PYKV_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define PYKV_SUMS_48 PYKV_EIGHT_OF(0), PYKV_EIGHT_OF(8), PYKV_EIGHT_OF(16)
#define PYKV_SUMS_96 PYKV_SUMS_48, PYKV_EIGHT_OF(24), PYKV_EIGHT_OF(32), PYKV_EIGHT_OF(40)
#define PYKV_SUMS_144 PYKV_SUMS_96, PYKV_EIGHT_OF(48), PYKV_EIGHT_OF(56), PYKV_EIGHT_OF(64)
#define PYKV_SUMS_192 PYKV_SUMS_144, PYKV_EIGHT_OF(72), PYKV_EIGHT_OF(80), PYKV_EIGHT_OF(88)
#define PYKV_NAMES_8 "%0, %1, %2, %3"
#define PYKV_NAMES_48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define PYKV_NAMES_96                                                                                           \
  PYKV_NAMES_48                                                                                                 \
  ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
  "%45, %46, %47"
#define PYKV_NAMES_144                                                                                          \
  PYKV_NAMES_96                                                                                                 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, " \
  "%69, %70, %71"
#define PYKV_NAMES_192                                                                                          \
  PYKV_NAMES_144                                                                                                \
  ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, " \
  "%93, %94, %95"

#define PYKV_WGMMA(T, TYPE, N, P0, P1, P2)                                                                         \
  template <>                                                                                                      \
  struct Wgmma<T, N> {                                                                                             \
    static __device__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                   "." TYPE " {" PYKV_NAMES_##N "}, " P0 ", " P1 ", p, 1, 1, 0, 0;}"                               \
                   : PYKV_SUMS_##N                                                                                 \
                   : "l"(a), "l"(b), "r"(add));                                                                    \
    }                                                                                                              \
  };
#define PYKV_WGMMAS(T, TYPE)                    \
  PYKV_WGMMA(T, TYPE, 8, "%4", "%5", "%6")      \
  PYKV_WGMMA(T, TYPE, 48, "%24", "%25", "%26")  \
  PYKV_WGMMA(T, TYPE, 96, "%48", "%49", "%50")  \
  PYKV_WGMMA(T, TYPE, 144, "%72", "%73", "%74") \
  PYKV_WGMMA(T, TYPE, 192, "%96", "%97", "%98")

PYKV_WGMMAS(half, "f16")
PYKV_WGMMAS(bf16, "bf16")

#undef PYKV_WGMMAS
#undef PYKV_WGMMA
#undef PYKV_EIGHT_OF
#undef PYKV_SUMS_8
#undef PYKV_NAMES_8
#undef PYKV_SUMS_48
#undef PYKV_NAMES_48
#undef PYKV_SUMS_96
#undef PYKV_NAMES_96
#undef PYKV_SUMS_144
#undef PYKV_NAMES_144
#undef PYKV_SUMS_192
#undef PYKV_NAMES_192

}  // namespace pykv
