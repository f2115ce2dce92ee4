// Activations of floats, within some units in the last place.
#pragma once

#include "activation/erfc.h"
#include "cpu/sigmoid.h"

namespace pykv::PYKV_ISA {

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class T>
inline Pair<T> gelu_tanh(Pair<T> x) {
  return times_sigmoid(x, x * (1.5957691216057308f + 0.07135481282f * (x * x)));
}

// x * Phi(x), Phi the normal distribution.  For the tail's sake not by erf, whose sum with 1 cancels: with z = |x| / sqrt(2),
// erfc(z) / 2 as in erfc.h.  -inf gives NaN, as the formula does.
template <class T>
inline Pair<T> gelu(Pair<T> x) {
  return each(x, [](Floats x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 2) {
      const Floats t = 1.0f / (1.0f + 0.35355339f * abs(x));
      // below 2^-126 the product with t is 0 for all that matters
      const QuickPower power(greater(-0.72134752f * x * x, splat(-126.0f)));
      const Floats factor = t * erfc_factor(t) * power.s, tail = factor * power.g + factor;
      return x * (x < 0.0f ? tail : 1.0f - tail);
    }
#endif
    const Floats z = abs(x) * 0.70710678f;
    const Floats t = 1.0f / (1.0f + 0.5f * z);
    const Floats tail = t * erfc_factor(t) * exp(-z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
  });
}

}  // namespace pykv::PYKV_ISA
