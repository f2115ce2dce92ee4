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

// The same for numbers of T.  bf16 takes 6 instructions instead of 15, with an error below 3e-7, relatively: rounded to bf16, all
// results have the same bits, but for -0 where x < -87.3.  Halves would not: some of their small results lie on borders.
//
// exp(-x) = 2^(-c x) (1 - k x) with c = log2(e) to so few bits that its product with x is exact, and k = (log2(e) - c) / log2(e).
// Half of 1 - k x is kept between 0 and 1 so that no infinity becomes NaN.
template <class T>
__device__ float silu_of(float x) {
  if constexpr (!std::is_same_v<T, __nv_bfloat16>) {
    return silu(x);
  } else {
    constexpr float c = 23637.0f / 16384, k = 4.88849e-6f;
    const float power = power_of_2(fmaf(-c, x, 1.0f)), rest = __saturatef(fmaf(-0.5f * k, x, 0.5f));
    return x * reciprocal(fmaf(power, rest, 1.0f));
  }
}

// R_T(R_T(silu(gate)) * up); an `up` of -0 counts as 0.
template <class T, int kSize>
__device__ Vec<T, kSize> silu_and_mul(const Vec<T, kSize>& gate, const Vec<T, kSize>& up) {
  auto x = to_floats(gate);
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = silu_of<T>(x[i]);
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

// beta * tanh(x / beta) * sigmoid(x), and what it is multiplied with, bounded by linear_beta where that is positive.
//
// Of numbers of 16 bits the two quotients are one, with an error below 6e-6, relatively: with a = exp(-x) and b = exp(-2 |x| / beta)
// it is beta (1 - b) / ((1 + a) (1 + b)), where beta (1 - b) is a polynomial for small x.  19 instructions, 3 of them of the unit
// for special functions.
template <class T>
struct Situ {
  static constexpr float kLog2E = 1.44269502f, kLn2 = 0.693147182f;
  float beta, inverse_beta, linear_beta, inverse_linear_beta;
  float rate, first, second, third;  // of the exponent of b, and of the polynomial
  __device__ Situ(float given, float linear_beta)
      : beta(fabsf(given)),
        inverse_beta(1.0f / beta),
        linear_beta(linear_beta),
        inverse_linear_beta(1.0f / linear_beta),
        rate(2.0f * kLog2E * inverse_beta),
        first(beta * kLn2),
        second(beta * (-kLn2 * kLn2 / 2)),
        third(beta * (kLn2 * kLn2 * kLn2 / 6)) {}
  __device__ float activation(float x) const {
    if constexpr (sizeof(T) == 4) {
      return 0.5f * beta * tanhf(x * inverse_beta) * (1.0f + tanhf(0.5f * x));
    } else {
      const float t = fabsf(x) * rate, a = power_of_2(-kLog2E * x), b = power_of_2(-t), sum = 1.0f + b;
      const float near = t * fmaf(t, fmaf(t, third, second), first);
      const float difference = t < 0.05f ? near : fmaf(-beta, b, beta);
      return copysignf(difference, x) * reciprocal(fmaf(a, sum, sum));
    }
  }
  __device__ float product(float activated, float up) const {
    return activated * (linear_beta > 0.0f ? linear_beta * tanhf(up * inverse_linear_beta) : up);
  }
};

}  // namespace pykv
