// Activations of vectors of floats, within some units in the last place.
#pragma once

#include "activation/erfc.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// x / (1 + exp(-x)); -inf gives NaN, as the formula does.
inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) { return x / (1.0f + exp(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }

// x * Phi(x), Phi the normal distribution.  For the tail's sake not by erf, whose sum with 1 cancels: with z = |x| / sqrt(2),
// erfc(z) / 2 as in erfc.h.  -inf gives NaN, as the formula does.
inline Floats gelu(Floats x) {
  const Floats z = (x < 0.0f ? -x : x) * 0.70710678f;
  const Floats t = 1.0f / (1.0f + 0.5f * z);
  const Floats tail = t * erfc_factor(t) * exp(-z * z);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

}  // namespace pykv::PYKV_ISA
