// One-byte results of quantising ops: the nearest code to a number, ties to even, the last one where it is too large.
//
// Unlike in a KV cache (cuda/fp8.cuh), NaN becomes the largest number (E4M3) or 0 (int8).
#pragma once

#include <cuda_fp8.h>

#include "core/dtype.h"
#include "cuda/vec.cuh"

namespace pykv {

// Four numbers, the first in the lowest byte.
template <DType kFormat>
__device__ uint32_t quantise4(float a, float b, float c, float d) {
  if constexpr (kFormat == DType::kInt8) {
    const auto code = [](float x) {
      int32_t q;
      asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(q) : "f"(x));
      return static_cast<uint32_t>(q);
    };
    return __byte_perm(__byte_perm(code(a), code(b), 0x0040), __byte_perm(code(c), code(d), 0x0040), 0x5410);
  } else {
    static_assert(kFormat == DType::kFloat8E4M3);
    const auto codes = [](float x, float y) -> uint32_t {
      return __nv_cvt_float2_to_fp8x2({fminf(x, 448.0f), fminf(y, 448.0f)}, __NV_SATFINITE, __NV_E4M3);
    };
    return codes(a, b) | codes(c, d) << 16;
  }
}

template <DType kFormat, int kSize>
__device__ Vec<uint8_t, kSize> quantise(const Vec<float, kSize>& x) {
  Vec<uint8_t, kSize> codes;
  if constexpr (kSize % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i)
      codes.words[i] = quantise4<kFormat>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) codes[i] = static_cast<uint8_t>(quantise4<kFormat>(x[i], x[i], x[i], x[i]));
  }
  return codes;
}

}  // namespace pykv
