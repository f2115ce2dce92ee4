// int8 with a zero point: what it is made of, and how.
#pragma once

#include <cmath>

#include "cuda/pairs.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// The least and the largest number, NaN being passed over; infinities where there is none.
struct Extremes {
  float low = INFINITY, high = -INFINITY;

  __device__ void take(float v) {
    low = fminf(low, v);
    high = fmaxf(high, v);
  }
  template <class T, int kSize>
  __device__ void take(const Vec<T, kSize>& v) {
    if constexpr (kInWords<T, kSize>) {
      Pair<T> least = as_pair<T>(v.words[0]), most = least;
#pragma unroll
      for (int i = 1; i < kSize / 2; ++i) {
        least = __hmin2(least, as_pair<T>(v.words[i]));
        most = __hmax2(most, as_pair<T>(v.words[i]));
      }
      const float2 lows = word_to_floats<T>(as_word(least)), highs = word_to_floats<T>(as_word(most));
      low = fminf(low, fminf(lows.x, lows.y));
      high = fmaxf(high, fmaxf(highs.x, highs.y));
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) take(v[i]);
    }
  }
};

// int8 of x times a factor, plus a zero point, saturated; NaN is 0 before it is added.
class ShiftedInt8 {
 public:
  __device__ ShiftedInt8(float factor, int zero_point) : factor_(factor), zero_point_(zero_point) {
    // what the sum saturates, before it is made
    low_ = static_cast<int>(max(int64_t{-128} - zero_point, int64_t{INT32_MIN}));
    high_ = static_cast<int>(min(int64_t{127} - zero_point, int64_t{INT32_MAX}));
  }
  template <class T, int kSize>
  __device__ Vec<uint8_t, kSize> operator()(const Vec<T, kSize>& x) const {
    const auto v = to_floats(x);
    // A product that 16 bits do not hold saturates the sum, if the zero point is no such number.
    if (static_cast<uint32_t>(zero_point_) + 0x7f00u < 0xfe00u)
      return packed<kSize>([&](int i) {
        int q;
        asm("cvt.rni.sat.s16.f32 %0, %1;" : "=r"(q) : "f"(__fmul_rn(v[i], factor_)));
        return q + zero_point_;
      });
    return packed<kSize>(
        [&](int i) { return max(min(__float2int_rn(__fmul_rn(v[i], factor_)), high_), low_) + zero_point_; });
  }

 private:
  template <int kSize, class Sum>
  __device__ static Vec<uint8_t, kSize> packed(const Sum& sum) {
    const auto pair = [&](int i, uint32_t behind) {  // saturated
      uint32_t bytes;
      asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(sum(i + 1)), "r"(sum(i)), "r"(behind));
      return bytes;
    };
    Vec<uint8_t, kSize> codes;
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) codes.words[i] = pair(4 * i, pair(4 * i + 2, 0));
    return codes;
  }

  float factor_;
  int zero_point_, low_, high_;
};

}  // namespace pykv
