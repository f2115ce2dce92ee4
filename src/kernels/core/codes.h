// Codes of few bits and their scales: what all quantising ops agree on, fused ones and others, on either device.
//
// Numbers that share a scale become code(number * factor), to nearest even and saturated; or, of rows in fp8, code(number / scale).
// NaN is passed over when the largest magnitude is found.  As a number it becomes the largest code (int8: 0).
//
// Functions are inlined by force: the CPU twins compile them for several instruction sets, and none may become a symbol that
// they share.
#pragma once

#include <cstdint>

#include "core/bits.h"

#define PYKV_INLINE PYKV_HOST_DEVICE __attribute__((always_inline)) inline

namespace pykv {

enum class QuantCode : uint8_t { kE4M3, kE5M2, kInt8, kInt8Truncated, kE2M1 };

constexpr bool is_int8(QuantCode kind) { return kind == QuantCode::kInt8 || kind == QuantCode::kInt8Truncated; }
constexpr float largest_code(QuantCode kind) {
  return kind == QuantCode::kE4M3   ? 448.0f
         : kind == QuantCode::kE5M2 ? 57344.0f
         : kind == QuantCode::kE2M1 ? 6.0f
                                    : 127.0f;
}
// The exponent of the largest code: what the OCP formats subtract from that of the largest magnitude.
constexpr int largest_exponent(QuantCode kind) {
  return kind == QuantCode::kE4M3 ? 8 : kind == QuantCode::kE5M2 ? 15 : kind == QuantCode::kE2M1 ? 2 : 6;
}

// What a scale is stored as: fp32; fp32, but a power of two; its exponent (e8m0); the same, of mxfp4 and mxfp8; e4m3 below a
// global scale (nvfp4).
enum class QuantScale : uint8_t { kFloat, kPowerOfTwo, kE8M0, kMx, kE4M3 };

// How the exponent follows from the largest magnitude: the least one that no number is too large for; the OCP formats' own,
// by which numbers above the largest code saturate; what vLLM 0.22 has (e2m1: magnitude / 6 rounded down; e4m3: magnitude
// rounded down).
enum class ExponentRule : uint8_t { kCeil, kOcp, kVllm };

// The exponent of the least power of two that is not below x >= 0; 2^-126 for smaller ones.
PYKV_INLINE uint32_t exponent_from(float x) {
  const uint32_t exponent = (bits_of(x) + 0x7fffffu) >> 23;
  return exponent > 0 ? exponent : 1;
}

PYKV_INLINE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

// x >= 0 as e4m3, at most 448; and back.
PYKV_INLINE uint32_t e4m3_of_magnitude(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair;
#endif
  const float within = x < 448.0f ? x : 448.0f;
  const uint32_t bits = bits_of(within);
  if (bits < 0x3c800000u) return bits_of(within + 0x1p14f) - bits_of(0x1p14f);  // below 2^-6, in steps of 2^-9
  return ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
}
PYKV_INLINE float magnitude_of_e4m3(uint32_t code) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  float x;
  asm("{.reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 pair, %1; mov.b32 {low, high}, pair; cvt.f32.f16 %0, "
      "low;}"
      : "=f"(x)
      : "h"(static_cast<uint16_t>(code)));
  return x;
#endif
  return code < 8 ? static_cast<float>(code) * 0x1p-9f : float_of((code << 20) + (120u << 23));
}

// The factor that brings numbers to codes, from their scale.  Scales so small that it would be infinite have zeros alone, or next
// to.
PYKV_INLINE float factor_of(float scale) {
  const float factor = 1.0f / scale;
  return factor < __FLT_MAX__ ? factor : __FLT_MAX__;
}

struct GroupScale {
  uint32_t stored;  // bits of fp32, or a byte
  float factor;
};

// From the largest magnitude of a group to its scale.
struct ScaleRule {
  QuantScale kind;
  ExponentRule exponent;
  float largest;  // code
  float least_scale;
  int code_exponent;  // largest_exponent of the codes

  // most: not NaN.  given: of e4m3 scales the global one, which multiplies them; of fp32 ones what they are at most.  target: of
  // e4m3 scales the code that the largest number becomes.
  PYKV_INLINE GroupScale operator()(float most, float given, float target) const {
    if (kind == QuantScale::kE4M3) return below_global(most, given, target);
    if (kind == QuantScale::kMx) return of_block(most);
    const float wanted = most / largest, within = wanted < given ? wanted : given,
                scale = within > least_scale ? within : least_scale;
    if (kind == QuantScale::kFloat) return {bits_of(scale), factor_of(scale)};
    const uint32_t exponent = exponent_from(scale > 1e-10f ? scale : 1e-10f);
    const uint32_t capped = exponent < 254 ? exponent : 254;
    return {kind == QuantScale::kE8M0 ? capped : capped << 23, inverse_power(capped)};
  }
  // Blocks of mxfp4 and mxfp8 that have no number but such as are next to nothing become zeros.  Infinity counts as the largest
  // number.
  PYKV_INLINE GroupScale of_block(float largest_given) const {
    const float most = largest_given < __FLT_MAX__ ? largest_given : __FLT_MAX__;
    uint32_t found = bits_of(most) >> 23;
    if (exponent == ExponentRule::kOcp) {
      found = found > static_cast<uint32_t>(code_exponent) ? found - code_exponent : 0;
    } else if (exponent == ExponentRule::kCeil) {
      found = most == 0.0f ? 0 : exponent_from(most * (1.0f / largest));
    } else if (largest == 6.0f) {
      found = bits_of(most * (1.0f / largest)) >> 23;
    } else if (found == 0) {
      found = 1;
    }
    return {found, found == 0 ? 0.0f : inverse_power(found)};
  }
  PYKV_INLINE static GroupScale below_global(float most, float global, float target) {
    const float wanted = global * (most * (1.0f / target));
    const uint32_t code = wanted == wanted ? e4m3_of_magnitude(magnitude(wanted)) : 0;
    const float unit = magnitude_of_e4m3(code) * (1.0f / magnitude(global));
    return {code | (global < 0.0f && code ? 0x80u : 0u), code == 0 ? 0.0f : factor_of(unit)};
  }

 private:
  // 2^(127 - exponent)
  PYKV_INLINE static float inverse_power(uint32_t exponent) {
    return float_of(exponent < 254 ? (254 - exponent) << 23 : 0x400000u);
  }
};

// Scales in tiles of 2^bits rows and 4 groups, as tensor cores of later chips want them, `tiles` of them side by side.  A word
// has the four of a row.  In tiles of 128 rows each is 4 words from the next, up to 32; in tiles of 8 they are neighbours.
PYKV_INLINE int64_t word_of_tile(int64_t row, int bits) { return bits == 7 ? row % 32 * 4 + row / 32 : row; }
PYKV_INLINE int64_t swizzled_place(int64_t row, int64_t group, int64_t tiles, int bits) {
  const int64_t within = row & ((1 << bits) - 1), tile = (row >> bits) * tiles + group / 4;
  return ((tile << bits) + word_of_tile(within, bits)) * 4 + group % 4;
}

}  // namespace pykv
