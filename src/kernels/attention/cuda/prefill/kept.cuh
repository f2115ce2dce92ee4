// The sums of merge/exact.cuh while they have few terms, in half the room: what prefill with batch_invariant keeps in
// memory from chunk to chunk.
#pragma once

#include "attention/cuda/merge/exact.cuh"

namespace pykv::attention {

// An ExactSum<4> of few terms: the digits of a number side by side in 64 bits, so that they are added together.
struct KeptQuad {
  static_assert(kDigits == 3);
  static constexpr int kBits = 21, kMostTerms = (1 << (kBits - kDigitBits)) - 1;
  static constexpr int kNoPlace = -(1 << 23), kNone = kNoPlace * 256;

  long long x[4];
  int state;  // place, and two bits for each number: 1 for +inf, 2 for -inf, 3 for NaN

  __device__ int place() const { return state >> 8; }

  __device__ void set(const int4& a, const int4& b) {
    x[0] = wide(a.x, a.y);
    x[1] = wide(a.z, a.w);
    x[2] = wide(b.x, b.y);
    x[3] = wide(b.z, b.w);
  }
  __device__ void get(int4& a, int4& b) const {
    a = {static_cast<int>(x[0]), static_cast<int>(x[0] >> 32), static_cast<int>(x[1]), static_cast<int>(x[1] >> 32)};
    b = {static_cast<int>(x[2]), static_cast<int>(x[2] >> 32), static_cast<int>(x[3]), static_cast<int>(x[3] >> 32)};
  }

  // Adds all y[i] * 2^exponent[i].  What they need is known before the first of them is cut: false, and nothing is added, if that
  // is more than numbers that are neither very small nor large need (add_any() adds those).
  template <int kCount>
  __device__ bool add_usual(const float (&y)[kCount][4], const int (&exponent)[kCount]) {
    uint32_t most[kCount];  // bits of the greatest
    int top = place();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      most[i] = __float_as_uint(greatest(greatest(y[i][0], y[i][1]), greatest(y[i][2], y[i][3])));
      const int needed = (static_cast<int>(most[i] >> 23) - 126 + kDigitBits + exponent[i]) >> 4;  // place_above()
      if (most[i] != 0) top = max(top, needed);
    }
    bool usual = top <= place() + 1 || place() == kNoPlace;
    int biased[kCount];  // exponents of the factors
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      biased[i] = exponent[i] - kDigitBits * (top - 1) + 127;
      if (most[i] - 0x00800000u >= 0x7f000000u || biased[i] < 1 || biased[i] > 254) {
        usual = usual && most[i] == 0;
        biased[i] = 0;
      }
    }
    const bool raises = usual && top > place() && place() != kNoPlace;
    if (__any_sync(~0u, raises)) [[unlikely]] {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = raises ? without_last(x[e]) : x[e];
    }
    if (usual) state = top * 256 + (state & 255);
    float factor[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) factor[i] = __int_as_float(usual ? biased[i] << 23 : 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int digits[kDigits];
#pragma unroll
      for (int k = 0; k < kDigits; ++k) digits[k] = -kCount * __float_as_int(whole(k));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float rest = y[i][e] * factor[i];
#pragma unroll
        for (int k = 0; k < kDigits; ++k) {  // as cut(), without its products
          const float shown = rest + whole(k);
          digits[k] += __float_as_int(shown);
          if (k + 1 < kDigits) rest -= shown - whole(k);
        }
      }
      join(e, digits);
    }
    return usual;
  }

  // As ExactSum::add_any.
  __device__ void add_any(const float* y, int exponent) {
    int top = place();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!isfinite(y[e])) {
        state |= (isnan(y[e]) ? 3 : y[e] > 0 ? 1 : 2) << 2 * e;
      } else if (y[e] != 0) {
        top = max(top, place_above(y[e], exponent));
      }
    }
    raise(top);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int digits[kDigits] = {0, 0, 0};
      if (isfinite(y[e])) add_digits(ldexpf(y[e], exponent - kDigitBits * (place() - 1)), digits);
      join(e, digits);
    }
  }

  __device__ ExactSum<4> unpacked() const {
    ExactSum<4> sum;
    sum.place = place() == kNoPlace ? ExactSum<4>::kEmpty : place();
    sum.not_finite = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int kind = state >> 2 * e & 3;
      sum.not_finite |= (kind == 3 ? 1 : 2 * kind) << 3 * e;
      const long long above = without_last(x[e]), first = without_last(above);
      sum.digit[0][e] = static_cast<int>(first);
      sum.digit[1][e] = last(above);
      sum.digit[2][e] = last(x[e]);
    }
    return sum;
  }

 private:
  // Of their amounts; NaN is greater than all.
  static __device__ float greatest(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(fabsf(a)), "f"(fabsf(b)));
    return c;
  }

  // What shows the k-th digit of a number that it is added to.
  static constexpr __device__ float whole(int k) { return k == 0 ? 0x1.8p23f : k == 1 ? 0x1.8p7f : 0x1.8p-9f; }

  static __device__ void add_digits(float y, int (&digits)[kDigits]) {
    cut(y, [&](int i, int x) { digits[i] += x; });
  }

  static __device__ long long wide(int low, int high) {
    return static_cast<long long>(high) << 32 | static_cast<uint32_t>(low);
  }
  static __device__ int last(long long x) { return static_cast<int>(x << (64 - kBits) >> (64 - kBits)); }
  static __device__ long long without_last(long long x) { return (x - last(x)) >> kBits; }

  __device__ void join(int e, const int (&digits)[kDigits]) {
    x[e] +=
        (static_cast<long long>(digits[0]) << 2 * kBits) + static_cast<long long>(digits[1]) * (1 << kBits) + digits[2];
  }

  // As ExactSum::raise.
  __device__ void raise(int to) {
    if (to <= place()) return;
    const int by = place() == kNoPlace ? kDigits : min(to - place(), kDigits);
#pragma unroll 1
    for (int i = 0; i < by; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = without_last(x[e]);
    }
    state = to * 256 + (state & 255);
  }
};

}  // namespace pykv::attention
