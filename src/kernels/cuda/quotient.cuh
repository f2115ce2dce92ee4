// Division by one number that many are divided by: a scale, or a size.
#pragma once

#include <cstdint>

namespace pykv {

// x / divisor, rounded as a division is, from a quotient near it: Markstein's correction.
__device__ inline float corrected(float quotient, float x, float divisor, float inverse) {
  return fmaf(fmaf(-divisor, quotient, x), inverse, quotient);
}

// x / scale, rounded as a division is wherever rounding it further to fp8 depends on that.
//
// 1 / scale is held as a sum, r + rest with r the float below it: x * r + x * rest is two instructions instead of a
// division's ten.  Both products carry one sign, so that infinities and overflow come through and saturate.  For every
// scale this rounds all quotients of half and bf16 to the code that a division leads to (checked exhaustively); 24-bit
// numerators take one Newton step more.  Scales far from 1 are brought closer, x with them, by a power of two.
class Quotient {
 public:
  Quotient() = default;  // by nothing yet
  __device__ explicit Quotient(float scale) {
    power_ = fabsf(scale) < 0x1p-40f ? 0x1p64f : fabsf(scale) > kMostPlain ? 0x1p-64f : 1.0f;
    scale_ = scale * power_;
    hold(__frcp_rn(scale_));
  }
  // By a scale from 2^-40 to kMostPlain, for which the compiler leaves out what others need.
  __device__ static Quotient plain(float scale) {
    Quotient made;
    made.power_ = 1.0f;
    made.scale_ = scale;
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(scale));
    made.hold(fmaf(r, fmaf(-scale, r, 1.0f), r));
    return made;
  }
  static constexpr float kMostPlain = 0x1p40f;

  // All of x, in place.  T is the type that they had.
  template <class T, int kSize>
  __device__ void divide(float (&x)[kSize]) const {
    if (power_ != 1.0f) {  // the same for a whole head
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= power_;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float q = fmaf(x[i], reciprocal_, x[i] * rest_);
      if constexpr (sizeof(T) < 4) {
        x[i] = q;
      } else {
        x[i] = q != 0.0f && fabsf(q) < 0x1p20f ? corrected(q, x[i], scale_, reciprocal_) : q;
      }
    }
  }

  // Whether x goes in as it is.
  __device__ bool is_plain() const { return power_ == 1.0f; }
  // What the lane of this number among each `lanes` lanes of the warp has, all of them plain.
  template <class T>
  __device__ Quotient of_lane(int lane, int lanes) const {
    const auto of = [&](float x) { return __shfl_sync(0xffffffffu, x, lane, lanes); };
    Quotient other = *this;
    other.power_ = 1.0f;
    other.reciprocal_ = of(reciprocal_);
    other.rest_ = of(rest_);
    if constexpr (sizeof(T) == 4) other.scale_ = of(scale_);
    return other;
  }

  __device__ uint32_t sign_bytes() const { return scale_ < 0.0f ? 0x80808080u : 0u; }

 private:
  // From 1 / scale_ to nearest.
  __device__ void hold(float nearest) {
    reciprocal_ = nearest;
    if (fmaf(-scale_, reciprocal_, 1.0f) <= 0.0f) reciprocal_ = __uint_as_float(__float_as_uint(reciprocal_) - 1);
    // rest = r (e + e^2 + ...); the factor, for the terms left out, matters where the second rounds to a tie.
    const float error = fmaf(-scale_, reciprocal_, 1.0f), first = error * reciprocal_;
    rest_ =
        error > 0.0f ? fmaf(first, error * 0x1.000004p0f, first) : reciprocal_;  // scale 0 or not finite: the latter
  }

  float scale_, power_, reciprocal_, rest_;
};

}  // namespace pykv
