// The activations that quantising ops have of their own, too.
#pragma once

#include "cpu/pairs.h"

namespace pykv::PYKV_ISA {

// Formulas, rounded at every step as accurate exp, erf and tanh are: others that compute them so give the same bits.

// x / (1 + exp(-y)) for y infinite or NaN only where x is.
template <class T>
inline Pair<T> exactly_times_sigmoid(Pair<T> x, Pair<T> y) {
  return x / (1.0f + each(-y, [](Floats v) { return exp(v); }));
}

template <class T>
inline Pair<T> exact_silu(Pair<T> x) {
  return exactly_times_sigmoid(x, x);
}

inline Floats with_sign_of(Floats magnitude, Floats x) {
  return __builtin_bit_cast(Floats,
                            __builtin_bit_cast(Words, magnitude) | (__builtin_bit_cast(Words, x) & 0x80000000u));
}

// tanh x: near zero x (1 + x^2 p(x^2)), where 1 - 2 / (exp(2 |x|) + 1) would cancel.  Not x + x^3 p: where x is a product itself, a
// compiler has two products to choose one from for its fused step, and chooses differently from operation to operation.
inline Floats exact_tanh(Floats x) {
  const Floats a = abs(x), s = x * x;
  Floats p = s * -0.00590586412f + 0.0208053807f;
  p = p * s - 0.0537866824f;
  p = p * s + 0.133319582f;
  p = p * s - 0.333332993f;
  return a < 0.6f ? (p * s + 1.0f) * x : with_sign_of(1.0f - 2.0f / (exp(2.0f * a) + 1.0f), x);
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
inline Floats exact_gelu_tanh(Floats x) {
  return 0.5f * x * (1.0f + exact_tanh(0.79788456f * (x + 0.044715f * (x * x * x))));
}

// beta * tanh(gate / beta) * sigmoid(gate), with the sigmoid as (1 + tanh(gate / 2)) / 2; times up, bounded by linear_beta where
// that is positive.
struct Situ {
  float beta, linear_beta;

  template <class T>
  Pair<T> operator()(Pair<T> gate, Pair<T> up) const {
    const auto activated = each(gate, [beta = beta](Floats x) {
      return 0.5f * beta * exact_tanh(x * (1.0f / beta)) * (1.0f + exact_tanh(0.5f * x));
    });
    if (!(linear_beta > 0.0f)) return activated * up;
    return activated * each(up, [linear_beta = linear_beta](Floats x) {
             return linear_beta * exact_tanh(x * (1.0f / linear_beta));
           });
  }
};

}  // namespace pykv::PYKV_ISA
