// Activations of one fp32 number, within some units in the last place.
//
// While memory delivers one element of a 16-bit dtype, an H200 issues some 29 instructions (where one is read for one that
// is written; 43 where two are): hence the approximate instructions, with subnormals flushed, which are single ones.
#pragma once

#include "activation/erfc.h"
#include "cuda/approximate.cuh"

namespace pykv {

// 1 / (1 + exp(-x)) = 0.5 / (0.5 + 2^t * 2^lost / 2): t is rounded, and what that lost, far below 1, is made good.  The
// saturation gives a number where x is infinite, so that there too the result is that of the formula.
__device__ inline float sigmoid(float x) {
  const float t = -1.44269502f * x;
  const float lost = fmaf(-1.92596299e-8f, x, fmaf(-1.44269502f, x, -t));
  const float half_scale = __saturatef(fmaf(lost, 0.34657359f, 0.5f));
  return 0.5f * reciprocal(fmaf(power_of_2(t), half_scale, 0.5f));
}

// x / (1 + exp(-x)); -inf gives NaN, as the formula does.
__device__ inline float silu(float x) { return x * sigmoid(x); }

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ inline float gelu_tanh(float x) { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }

// x * Phi(x), Phi the normal distribution.  For the tail's sake not by erf, whose sum with 1 cancels: with z = |x| / sqrt(2),
// erfc(z) / 2 as in erfc.h.  -inf gives NaN, as the formula does.
__device__ inline float gelu(float x) {
  const float t = reciprocal(fmaf(fabsf(x), 0.35355339f, 1.0f));
  const float s = x * 0.84932180f;  // s^2 = z^2 * log2(e)
  const float tail = t * erfc_factor(t) * power_of_2(-s * s);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

}  // namespace pykv
