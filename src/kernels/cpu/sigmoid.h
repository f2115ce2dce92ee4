// Products with the logistic function, the expensive part of most activations.
//
// They end in a division: an estimate of the inverse, mended by Newton's step, is no quicker where four operations more lie
// in a chain that is long already.
#pragma once

#include "cpu/pairs.h"

namespace pykv::PYKV_ISA {

#if defined(__AVX512F__)
// 2^(j / 32) as bits, less what j adds when it is shifted to where the exponent lies (see quick_power).
struct PowerTable {
  alignas(64) uint32_t bits[32];

  constexpr PowerTable() : bits() {
    double power = 1.0;
    for (uint32_t j = 0; j < 32; ++j) {
      bits[j] = __builtin_bit_cast(uint32_t, static_cast<float>(power)) - (j << 18);
      power *= 1.0218971486541166;
    }
  }
};
static constexpr PowerTable kPowers;

// 2^y = s + s * g, s a power of 2^(1 / 32): within 2e-7 of the truth if y is; NaN may come out where it does not fit, and
// y must not be below -126.  A table and a short polynomial: the multipliers, of which Zen 4 has half as many as other
// units, are what such arithmetic waits for.
struct QuickPower {
  Floats s, g;

  explicit QuickPower(Floats y) {
    const float round = 393216.0f;  // 1.5 * 2^18: adding it rounds to a 32nd, the lowest five bits
    const Floats shifted = y + round;
    const Floats f = y - (shifted - round);
    const Words j = __builtin_bit_cast(Words, shifted);
    const __m512i root = _mm512_permutex2var_epi32(_mm512_load_si512(kPowers.bits), __builtin_bit_cast(__m512i, j),
                                                   _mm512_load_si512(kPowers.bits + 16));
    s = __builtin_bit_cast(Floats, __builtin_bit_cast(Words, root) + (j << 18));
    g = (f * 0.240226507f + 0.693157315f) * f;  // 2^f - 1 within 6e-8, |f| <= 1/64
  }
};

// 1 + e^-x within 3e-7 of the truth, infinity below -88.71; not for NaN, which gives some number.
inline Floats quick_denominator(Floats x) {
  const Floats within =
      lesser(greater(x, splat(-88.72284f)), splat(87.0f));  // from -128 ln 2: s is infinite there, g is 0
  const QuickPower power(within * -1.44269504f);
  return power.s * (1.0f + power.g) + 1.0f;
}
#endif

// x / (1 + exp(-y)) for y infinite or NaN only where x is: -inf gives NaN, as the formula does.
template <class T>
inline Pair<T> times_sigmoid(Pair<T> x, Pair<T> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) return x / each(y, [](Floats v) { return quick_denominator(v); });
#endif
  return x / (1.0f + each(-y, [](Floats v) { return exp(v); }));
}

// 1 / (1 + exp(-x)); NaN stays.
template <class T>
inline Pair<T> logistic(Pair<T> x) {
  const Pair<T> values = times_sigmoid<T>(1.0f, x);
  return each(values, x, [](Floats value, Floats v) { return v == v ? value : v; });
}

template <class T>
inline Pair<T> silu(Pair<T> x) {
  return times_sigmoid(x, x);
}

}  // namespace pykv::PYKV_ISA
