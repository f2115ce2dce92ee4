// Activations of one fp32 number, within some units in the last place.
#pragma once

namespace pykv {

__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ inline float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// x / (1 + exp(-x)); -inf gives NaN, as the formula does.
__device__ inline float silu(float x) { return x * sigmoid(x); }

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ inline float gelu_tanh(float x) {
  const float twice_u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + expf(-twice_u));
}

// x * Phi(x), Phi the normal distribution.  For the tail's sake not by erf, whose sum with 1 cancels: with z = |x| / sqrt(2)
// and t = 1 / (1 + z / 2), erfc(z) / 2 = t * exp(-z^2) * h(t), where h, smooth on [0, 1], is a polynomial fitted within
// 2e-7.  -inf gives NaN, as the formula does.
__device__ inline float gelu(float x) {
  const float z = fabsf(x) * 0.70710678f;
  const float t = reciprocal(1.0f + 0.5f * z);
  float h = 0.0067673246f;
  h = h * t - 0.064807028f;
  h = h * t + 0.22140557f;
  h = h * t - 0.34352291f;
  h = h * t + 0.21707594f;
  h = h * t - 0.05226424f;
  h = h * t + 0.11372276f;
  h = h * t + 0.11914411f;
  h = h * t + 0.14144701f;
  h = h * t + 0.14103144f;
  const float tail = t * h * expf(-z * z);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

}  // namespace pykv
