// GELU as its formulas, rounded at every step as accurate erf and tanh round: other kernels that compute them so give the same bits.
#pragma once

namespace pykv {

// x / 2 * (1 + erf(x / sqrt(2))); 26 instructions.
__device__ inline float gelu(float x) { return x * 0.5f * (1.0f + erff(x * 0.70710678f)); }

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); 22 instructions.
__device__ inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.79788456f * fmaf(0.044715f, x * x * x, x)));
}

}  // namespace pykv
