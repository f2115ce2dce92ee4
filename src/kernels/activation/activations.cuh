// Activations of one fp32 number.
//
// While memory delivers one element of a 16-bit dtype, an H200 issues some 29 instructions where one is read for one that
// is written, and 43 where two are.
#pragma once

#include "activation/erfc.h"
#include "cuda/approximate.cuh"
#include "cuda/gelu.cuh"
#include "cuda/silu.cuh"

namespace pykv {

// Approximate, within some units in the last place, with subnormals flushed: half the instructions.

// 1 / (1 + exp(-x)) = 0.5 / (0.5 + 2^t * 2^lost / 2): t is rounded, and what that lost, far below 1, is made good.  t is bounded
// where 2^t is infinite already, so that what it lost is no difference of infinities; where x is +inf, the saturation makes a
// number of that.
__device__ inline float sigmoid(float x) {
  const float t = fminf(-1.44269502f * x, 200.0f);
  const float lost = fmaf(-1.92596299e-8f, x, fmaf(-1.44269502f, x, -t));
  const float half_scale = __saturatef(fmaf(lost, 0.34657359f, 0.5f));
  return 0.5f * reciprocal(fmaf(power_of_2(t), half_scale, 0.5f));
}

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ inline float quick_gelu_tanh(float x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

}  // namespace pykv
