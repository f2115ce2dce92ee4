// Activations of floats.
#pragma once

#include "activation/erfc.h"
#include "cpu/sigmoid.h"
#include "cpu/silu.h"

namespace pykv::PYKV_ISA {

template <class T>
inline Pair<T> gelu_tanh(Pair<T> x) {
  return each(x, exact_gelu_tanh);
}

// exact_gelu_tanh() within some units in the last place, and quicker: x / (1 + exp(-2 u)).
template <class T>
inline Pair<T> quick_gelu_tanh(Pair<T> x) {
  return times_sigmoid(x, x * (1.5957691216057308f + 0.07135481282f * (x * x)));
}

#if defined(__AVX512F__)
// Phi(-a), Phi the normal distribution, for 0 <= a <= 15: within 1e-5 of the truth up to 5, 2e-4 up to 10 and 7e-4 up to 13;
// 0 at 15.  Its logarithm is a polynomial, and so is a power of 2: no division, and sums of pairs, since what such a chain
// waits for is the sum before.  Of all bf16 it rounds two to the wrong neighbour.
inline Floats quick_tail(Floats a) {
  const Floats b = a * a, c = b * b;
  const Floats low = (a * -0.0545331687f - 0.458052546f) * b + (a * -1.15136099f - 0.999990642f);
  const Floats middle = (a * -4.91544006e-06f + 8.99041697e-05f) * b + (a * -0.00107046019f + 0.00889343768f);
  const Floats log = ((a * -2.15398854e-09f + 1.55715938e-07f) * c + middle) * c + low;
  const Floats n = _mm512_maskz_roundscale_ps(0xffff, log, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = log - n, g = f * f;
  const Floats power =
      (g * 0.00957010221f + (f * 0.0559178628f + 0.240247443f)) * g + (f * 0.693121791f + 0.999999285f);
  return _mm512_maskz_scalef_ps(0xffff, power, n);
}
#endif

// Phi(-|x|) as erfc(z) / 2, z = |x| / sqrt(2), by erfc.h.
template <class T>
inline Floats normal_tail(Floats x) {
#if defined(__AVX512F__)
  if constexpr (__is_same(T, bf16)) return quick_tail(lesser(abs(x), splat(15.0f)));
  if constexpr (__is_same(T, f16)) {
    const Floats t = 1.0f / (1.0f + 0.35355339f * abs(x));
    // below 2^-126 the product with t is 0 for all that matters
    const QuickPower power(greater(-0.72134752f * x * x, splat(-126.0f)));
    const Floats factor = t * erfc_factor(t) * power.s;
    return factor * power.g + factor;
  }
#endif
  const Floats z = abs(x) * 0.70710678f;
  const Floats t = 1.0f / (1.0f + 0.5f * z);
  return t * erfc_factor(t) * exp(-z * z);
}

// x / 2 * (1 + erf(x / sqrt(2))).  erf is 1 - erfc, or near zero a polynomial, where that is not accurate enough (for bf16 it
// is).
template <class T>
inline Pair<T> gelu(Pair<T> x) {
  return each(x, [](Floats x) {
    Floats erf = 1.0f - 2.0f * normal_tail<T>(x);
    if constexpr (!__is_same(T, bf16)) {
      const Floats z = abs(x) * 0.70710678f, s = z * z;
      Floats p = s * -9.64151774e-06f + 0.000112569485f;
      p = p * s - 0.000848282892f;
      p = p * s + 0.00522094544f;
      p = p * s - 0.0268654f;
      p = p * s + 0.11283782f;
      p = p * s - 0.376126384f;
      p = p * s + 0.128379167f;
      erf = z < 1.0f ? z * p + z : erf;
    }
    return 0.5f * x * (1.0f + with_sign_of(erf, x));
  });
}

// x * Phi(x) of x >= 0, within some units in the last place.
template <class T>
inline Pair<T> gelu_above_zero(Pair<T> x) {
  return each(x, [](Floats x) { return x * (1.0f - normal_tail<T>(x)); });
}

}  // namespace pykv::PYKV_ISA
