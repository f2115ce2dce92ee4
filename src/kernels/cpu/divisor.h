// Quotients by one scale that are rounded to a byte.
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// v / scale for many v, without dividing, which takes a vector as long as ten other operations: v times the inverse is next
// to the quotient, and what is missing times the inverse decides (Markstein's theorem).  What is missing is exact, for
// product and sum are one operation: by name, since a compiler fuses them or not, as its flags say.  This is for numbers
// that neither overflow nor underflow on the way; where those may lie among others that do, two operations more see to it.
class Divisor {
 public:
  explicit Divisor(float scale)
      : scale_(scale), inverse_(1.0f / scale), way_(scale > 0x1p-80f && scale < 0x1p80f ? kCareful : kPlain) {}
  // Of v that are at most `largest`, or NaN.
  Divisor(float scale, float largest) : Divisor(scale) {
    if (scale > 0x1p-40f && scale < 0x1p40f && largest < 0x1p80f) way_ = kQuick;
  }

  friend float operator/(float v, const Divisor& by) { return v / by.scale_; }
  friend Floats operator/(Floats v, const Divisor& by) {
#if defined(__AVX512F__)
    if (by.way_ != kPlain) {
      const __m512 scale = splat(by.scale_), inverse = splat(by.inverse_), near = v * inverse;
      const __m512 rest = _mm512_fnmadd_ps(near, scale, v);
      if (by.way_ == kQuick) return with_sign(_mm512_fmadd_ps(rest, inverse, near), v);
      const __mmask16 finite = ~_mm512_fpclass_ps_mask(near, 0x99);  // neither an infinity nor NaN
      return with_sign(_mm512_mask3_fmadd_ps(rest, inverse, near, finite), v);
    }
#elif defined(__FMA__)
    if (by.way_ == kQuick) {
      const __m256 inverse = splat(by.inverse_), near = v * inverse;
      return with_sign(_mm256_fmadd_ps(_mm256_fnmadd_ps(near, splat(by.scale_), v), inverse, near), v);
    }
#endif
    return v / by.scale_;
  }

 private:
  enum Way { kPlain, kCareful, kQuick };
  // The quotient with v's sign, which a zero has lost.
  static Floats with_sign(Floats quotient, Floats v) {
    const Words q = __builtin_bit_cast(Words, quotient), sign = __builtin_bit_cast(Words, v);
#if defined(__AVX512F__)
    // 0xe4 is c ? a : b
    return __builtin_bit_cast(
        Floats, _mm512_ternarylogic_epi32(__builtin_bit_cast(__m512i, q), __builtin_bit_cast(__m512i, sign),
                                          _mm512_set1_epi32(0x7fffffff), 0xe4));
#else
    return __builtin_bit_cast(Floats, (q & 0x7fffffffu) | (sign & 0x80000000u));
#endif
  }

  float scale_;
  [[maybe_unused]] float inverse_;  // only where there is FMA
  Way way_;
};

}  // namespace pykv::PYKV_ISA
