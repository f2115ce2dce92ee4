// Instructions of the chip that are nearly a function of one fp32 number, with subnormals flushed.
#pragma once

namespace pykv {

__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 2^x; that of a rounded product has a relative error of half a unit in the last place for each unit of |x|.
__device__ inline float power_of_2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / (1 + exp(-x)) with a relative error below 5e-6, of which the rounded product is most: for numbers of 16 bits.
__device__ inline float rough_sigmoid(float x) { return reciprocal(1.0f + power_of_2(-1.44269502f * x)); }

}  // namespace pykv
