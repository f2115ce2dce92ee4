// The activations that quantising ops have of their own, too: rounded at every step as accurate exp, tanh and division round.
#pragma once

#include "cuda/approximate.cuh"
#include "cuda/pairs.cuh"
#include "cuda/quotient.cuh"

namespace pykv {

// x / (1 + exp(-y)) for y infinite or NaN wherever x is; 15 instructions.  The quotient is corrected to what a division gives
// but where 1 + exp(-y) is nearly 1 or infinite.  Scaled by 1/4, the reciprocal is no subnormal number.
__device__ inline float times_sigmoid(float x, float y) {
  const float denominator = 1.0f + expf(-y);
  const float inverse = 0.25f * reciprocal(0.25f * denominator);
  const float quotient = x * inverse;
  return fabsf(y) < 87.0f ? corrected(quotient, x, denominator, inverse) : quotient;
}

// x / (1 + exp(-x)); -inf gives NaN, as the formula does.
__device__ inline float silu(float x) { return times_sigmoid(x, x); }

// R_T(R_T(silu(gate)) * up); an `up` of -0 counts as 0.
template <class T, int kSize>
__device__ Vec<T, kSize> silu_and_mul(const Vec<T, kSize>& gate, const Vec<T, kSize>& up) {
  auto x = to_floats(gate);
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = silu(x[i]);
  auto product = round_to<T>(x);
  if constexpr (kInWords<T, kSize>) {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i)
      product.words[i] = multiply_pairs<T>(product.words[i], plus_zero<T>(up.words[i]));
    return product;
  } else {
    x = to_floats(product);
    const auto factor = to_floats(up);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= factor[i] + 0.0f;
    return round_to<T>(x);
  }
}

// beta * tanh(x / beta) * sigmoid(x), with the sigmoid as (1 + tanh(x / 2)) / 2; and what it is multiplied with, bounded by
// linear_beta where that is positive.
struct Situ {
  float half_beta, inverse_beta, linear_beta, inverse_linear_beta;
  __device__ Situ(float beta, float linear_beta)
      : half_beta(0.5f * beta),
        inverse_beta(1.0f / beta),
        linear_beta(linear_beta),
        inverse_linear_beta(1.0f / linear_beta) {}
  __device__ float activation(float x) const { return half_beta * tanhf(x * inverse_beta) * (1.0f + tanhf(0.5f * x)); }
  __device__ float product(float activated, float up) const {
    return activated * (linear_beta > 0.0f ? linear_beta * tanhf(up * inverse_linear_beta) : up);
  }
};

}  // namespace pykv
