// Sums of merge/exact.cuh for lanes that share the terms, one or few each: they agree on the place of the digits first,
// so that a term's digits can be one integer.  The bits are those of an ExactQuad.
#pragma once

#include "attention/cuda/merge/exact.cuh"

namespace pykv::attention {

// Four columns of a row, and the sum of its weights.
struct MergedQuad {
  int place = kNoPlace, total_place = kNoPlace;
  int not_finite = 0;  // three bits for each column, then for the total
  long long sum[5] = {0, 0, 0, 0, 0};

  // All lanes see their terms, agree, and add them.
  __device__ void see(const PartsOfChunk& x) {
    const int exponent = exponent_of(x.maximum);
    see({x.o.x, x.o.y, x.o.z, x.o.w}, exponent, place, 0);
    see({x.sum}, exponent, total_place, 12);
  }
  __device__ void see(const ExactQuad& x) {
    not_finite |= x.values.not_finite | x.total.not_finite << 12;
    place = max(place, x.values.place);
    total_place = max(total_place, x.total.place);
  }

  // With the lane whose number differs by the bit m.
  __device__ void agree(int m) {
    place = max(place, __shfl_xor_sync(~0u, place, m));
    total_place = max(total_place, __shfl_xor_sync(~0u, total_place, m));
    not_finite |= __shfl_xor_sync(~0u, not_finite, m);
  }

  __device__ void add(const PartsOfChunk& x) {
    const int exponent = exponent_of(x.maximum);
    const Power values(exponent, place), total(exponent, total_place);
    sum[0] += values.digits(x.o.x);
    sum[1] += values.digits(x.o.y);
    sum[2] += values.digits(x.o.z);
    sum[3] += values.digits(x.o.w);
    sum[4] += total.digits(x.sum);
  }
  __device__ void add(const ExactQuad& x) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += digits(x.values, e, place);
    sum[4] += digits(x.total, 0, total_place);
  }

  __device__ void add_lane(int m) {
#pragma unroll
    for (long long& x : sum) x += __shfl_xor_sync(~0u, x, m);
  }

  __device__ float4 finish(const Problem& p, const Row& row, int kv_head) const {
    const ExactEnd end(p, row, kv_head, number(4), exact_exponent(total_place));
    const int exponent = exact_exponent(place);
    return {end.of(number(0), exponent), end.of(number(1), exponent), end.of(number(2), exponent),
            end.of(number(3), exponent)};
  }

 private:
  // 2^(exponent - that of the last digit), which need not be a float.  What underflows on the way would be no digit either.
  struct Power {
    float half, rest;
    __device__ Power(int exponent, int place) {
      const int shift = min(max(exponent - kDigitBits * (place - kDigits), -252), 252);
      half = __int_as_float((shift / 2 + 127) << 23);
      rest = __int_as_float((shift - shift / 2 + 127) << 23);
    }
    __device__ long long digits(float x) const { return __float2ll_rn((isfinite(x) ? x : 0.f) * half * rest); }
  };

  template <int kN>
  __device__ void see(const float (&x)[kN], int exponent, int& place, int bit) {
    float greatest = 0;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (isfinite(x[e])) {
        greatest = fmaxf(greatest, fabsf(x[e]));
      } else {
        not_finite |= kind_of(x[e]) << (bit + 3 * e);
      }
    }
    if (greatest > 0) place = max(place, place_above(greatest, exponent));
  }

  // Those of a sum that still count.
  template <int kN>
  static __device__ long long digits(const ExactSum<kN>& x, int e, int place) {
    const int below = place - x.place;
    long long y = 0;
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
      if (i + below < kDigits) y = y * (1 << kDigitBits) + x.digit[i][e];
    }
    return y;
  }

  __device__ float number(int e) const { return exact_number(sum[e], not_finite >> 3 * e & 7); }
};

}  // namespace pykv::attention
