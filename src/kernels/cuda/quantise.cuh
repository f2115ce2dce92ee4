// One-byte results of quantising ops: the nearest code to a number, ties to even, the last one where it is too large.
//
// Unlike in a KV cache (cuda/fp8.cuh), NaN becomes the largest number (E4M3, E5M2) or 0 (int8).
#pragma once

#include <cuda_fp8.h>

#include "core/codes.h"
#include "core/dtype.h"
#include "cuda/pairs.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// Four numbers, the first in the lowest byte.  kNumbers: none is NaN.
template <DType kFormat, bool kNumbers = false>
__device__ uint32_t quantise4(float a, float b, float c, float d) {
  if constexpr (kFormat == DType::kInt8) {
    const auto code = [](float x) {
      int32_t q;
      asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(q) : "f"(x));
      return static_cast<uint32_t>(q);
    };
    return __byte_perm(__byte_perm(code(a), code(b), 0x0040), __byte_perm(code(c), code(d), 0x0040), 0x5410);
  } else {
    constexpr bool kE4M3 = kFormat == DType::kFloat8E4M3;
    static_assert(kE4M3 || kFormat == DType::kFloat8E5M2);
    constexpr float kMost = kE4M3 ? 448.0f : 57344.0f;
    const auto codes = [](float x, float y) -> uint32_t {
      const float2 pair = kNumbers ? float2{x, y} : float2{fminf(x, kMost), fminf(y, kMost)};
      return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kE4M3 ? __NV_E4M3 : __NV_E5M2);
    };
    return codes(a, b) | codes(c, d) << 16;
  }
}

template <DType kFormat, bool kNumbers = false, int kSize>
__device__ Vec<uint8_t, kSize> quantise(const Vec<float, kSize>& x) {
  Vec<uint8_t, kSize> codes;
  if constexpr (kSize % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i)
      codes.words[i] = quantise4<kFormat, kNumbers>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      codes[i] = static_cast<uint8_t>(quantise4<kFormat, kNumbers>(x[i], x[i], x[i], x[i]));
  }
  return codes;
}

// E4M3 codes of pairs of numbers times what `scaled` does to them, which makes NaN of infinities alone, and only where
// `odd` says so.
template <class T, int kSize, class Scaled>
__device__ Vec<uint8_t, kSize> quantise_pairs(Vec<T, kSize> x, bool odd, Scaled scaled) {
  if constexpr (kInWords<T, kSize>) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) x.words[i] = nan_to_infinity<T>(x.words[i]);
    auto codes = quantise<DType::kFloat8E4M3, true>(scaled(to_floats(x)));
    if (odd) {
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i)  // 0x7F, which NaN became, to 0x7E
        codes.words[i] -= ((codes.words[i] & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u) >> 7;
    }
    return codes;
  } else {
    return quantise<DType::kFloat8E4M3>(scaled(to_floats(x)));
  }
}

// Codes of x times a factor, of a kind that is known at run time.  odd: the factor is not a positive finite number.
template <class T, int kSize>
__device__ Vec<uint8_t, kSize> codes_times(QuantCode kind, const Vec<T, kSize>& x, float factor, bool odd) {
  const auto scaled = [factor](Vec<float, kSize> v) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] *= factor;
    return v;
  };
  if (kind == QuantCode::kE4M3) {
    if (!odd) return quantise_pairs(x, false, scaled);
    return quantise<DType::kFloat8E4M3>(scaled(to_floats(x)));
  }
  auto v = scaled(to_floats(x));
  if (kind == QuantCode::kE5M2) return quantise<DType::kFloat8E5M2>(v);
  if (kind == QuantCode::kInt8Truncated) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = truncf(v[i]);
  }
  return quantise<DType::kInt8>(v);
}

}  // namespace pykv
