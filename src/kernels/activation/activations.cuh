// Activations of one fp32 number, within some units in the last place.
//
// While memory delivers one element of a 16-bit dtype, an H200 issues some 29 instructions (where one is read for one that
// is written; 43 where two are): hence the approximate instructions, with subnormals flushed, which are single ones.
#pragma once

#include "activation/erfc.h"

namespace pykv {

__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 2^x; its relative error grows with |x|, which the caller has rounded.
__device__ inline float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ inline float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// x / (1 + exp(-x)); -inf gives NaN, as the formula does.
__device__ inline float silu(float x) { return x * sigmoid(x); }

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ inline float gelu_tanh(float x) {
  const float twice_u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x * reciprocal(1.0f + expf(-twice_u));
}

// x * Phi(x), Phi the normal distribution.  For the tail's sake not by erf, whose sum with 1 cancels: with z = |x| / sqrt(2),
// erfc(z) / 2 as in erfc.h.  -inf gives NaN, as the formula does.
__device__ inline float gelu(float x) {
  const float t = reciprocal(fmaf(fabsf(x), 0.35355339f, 1.0f));
  const float s = x * 0.84932180f;  // s^2 = z^2 * log2(e)
  const float tail = t * erfc_factor(t) * power_of_2(-s * s);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

}  // namespace pykv
