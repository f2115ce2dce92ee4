// Sums that come out the same to the last bit whatever the order of their terms, for batch_invariant.
//
// The keys of a row are taken in chunks that begin at multiples of kChunkTokens.  What a chunk gives depends on nothing
// but the row and the chunk; which blocks work on which chunks depends on the batch.  So the chunks' results are added up
// as digits: value = sum of digit[i] * 2^(kDigitBits * (place - 1 - i)).  Where a number is cut into digits is the same for
// all numbers, whole digits are added exactly, and the digits kept are the first ones of the greatest term.  Cutting rounds
// to the nearest digit, and what is left of it makes the next one: so the first digits are the number rounded to that
// place, however many more there were, and all this is associative.  The first three hold 32 bits or more of the greatest
// term.  A number is below half of what its digits could hold: so one whose digits all fall off the end would have been
// rounded to zero by the digits that are left.
//
// Of the greatest power of two times 2^15 chunks an int has room: hence kMostInvariantTokens.
#pragma once

#include "attention/cuda/rows.cuh"

namespace pykv::attention {

constexpr int kDigitBits = 16, kDigits = 3;
static_assert(kDigitBits == 1 << 4);
static_assert(kMostInvariantTokens / kChunkTokens <= 1 << (31 - kDigitBits));

// The place whose digits are enough for x * 2^exponent.
__device__ inline int place_above(float x, int exponent) {
  const int power = max(static_cast<int>(__float_as_uint(x) >> 23 & 255), 1) - 126 + exponent;
  return (power + kDigitBits) >> 4;  // a sixteenth of power + 1, rounded up
}

// take(i, x) for each digit x of y, which is below 2^kDigitBits.  What has 1.5 * 2^23 added to it is rounded to a whole number
// and shows it in its lowest bits.
template <class Take>
__device__ void cut(float y, Take take) {
  constexpr float kWhole = 3 << 22;
#pragma unroll
  for (int i = 0; i < kDigits; ++i) {
    const float shown = y + kWhole;
    take(i, __float_as_int(shown) - __float_as_int(kWhole));
    y = (y - (shown - kWhole)) * (1 << kDigitBits);
  }
}

// Bits for what is no finite number.
__device__ inline int kind_of(float x) { return isnan(x) ? 1 : x > 0 ? 2 : 4; }

// What a sum of digits is: exact_number() * 2^exact_exponent().
__device__ inline float exact_number(long long digits, int not_finite) {
  if (not_finite != 0) return not_finite == 2 ? INFINITY : not_finite == 4 ? -INFINITY : NAN;
  return static_cast<float>(digits);
}
constexpr int kNoPlace = -(1 << 26);
__device__ inline int exact_exponent(int place) { return place == kNoPlace ? 0 : kDigitBits * (place - kDigits); }

template <int kN>
struct ExactSum {
  static constexpr int kEmpty = kNoPlace;

  int place;       // of the first digit
  int not_finite;  // bits for each number: NaN, +inf, -inf
  int digit[kDigits][kN];

  __device__ void clear() {
    place = kEmpty;
    not_finite = 0;
#pragma unroll
    for (auto& row : digit) {
      for (int& x : row) x = 0;
    }
  }

  // Adds x * 2^exponent.
  __device__ void add(const float (&x)[kN], int exponent) {
    float most = 0, greatest = 0;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      most += fabsf(x[e]);
      greatest = fmaxf(greatest, fabsf(x[e]));
    }
    if (place == kEmpty && greatest > 0 && most < INFINITY) place = place_above(greatest, exponent);
    const int shift = exponent - kDigitBits * (place - 1);
    const float factor = __int_as_float((shift + 127) << 23);  // 2^shift
    if (shift < -126 || shift > 127 || !(most * factor < 1 << (kDigitBits - 1))) [[unlikely]]
      return add_any(x, exponent);
#pragma unroll
    for (int e = 0; e < kN; ++e) add_digits(x[e] * factor, e);
  }

  __device__ void add(const ExactSum& other) {
    not_finite |= other.not_finite;
    if (other.place == place) {
#pragma unroll
      for (int i = 0; i < kDigits; ++i) {
        for (int e = 0; e < kN; ++e) digit[i][e] += other.digit[i][e];
      }
      return;
    }
    if (other.place == kEmpty) return;
    raise(other.place);
    const int by = place - other.place;
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
#pragma unroll
      for (int k = 0; k <= i; ++k) {
        if (i - k != by) continue;
#pragma unroll
        for (int e = 0; e < kN; ++e) digit[i][e] += other.digit[k][e];
      }
    }
  }

  // That of the lane whose number differs by the bit m.
  __device__ ExactSum of_lane(int m) const {
    ExactSum x;
    x.place = __shfl_xor_sync(~0u, place, m);
    x.not_finite = __shfl_xor_sync(~0u, not_finite, m);
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
#pragma unroll
      for (int e = 0; e < kN; ++e) x.digit[i][e] = __shfl_xor_sync(~0u, digit[i][e], m);
    }
    return x;
  }

  // The e-th sum is number(e) * 2^exponent().
  __device__ float number(int e) const {
    return exact_number((static_cast<long long>(digit[0][e]) << 2 * kDigitBits) +
                            (static_cast<long long>(digit[1][e]) << kDigitBits) + digit[2][e],
                        not_finite >> 3 * e & 7);
  }
  __device__ int exponent() const { return exact_exponent(place); }

 private:
  __device__ void add_digits(float y, int e) {
    cut(y, [&](int i, int x) { digit[i][e] += x; });
  }

  // The same whatever the numbers are.
  __device__ void add_any(const float (&x)[kN], int exponent) {
    int top = kEmpty;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (!isfinite(x[e])) {
        not_finite |= kind_of(x[e]) << 3 * e;
      } else if (x[e] != 0) {
        top = max(top, place_above(x[e], exponent));
      }
    }
    if (top == kEmpty) return;
    raise(top);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (isfinite(x[e])) add_digits(ldexpf(x[e], exponent - kDigitBits * (place - 1)), e);
    }
  }

  // Makes room for greater numbers; digits that fall off the end are those of numbers that no longer count.
  __device__ void raise(int to) {
    if (to <= place) return;
    const int by = place == kEmpty ? kDigits : min(to - place, kDigits);
#pragma unroll
    for (int i = kDigits - 1; i >= 0; --i) {
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        int moved = 0;
#pragma unroll
        for (int k = 0; k < i; ++k) moved = i - k == by ? digit[k][e] : moved;
        digit[i][e] = moved;
      }
    }
    place = to;
  }
};

// Of a chunk, whose maximum may be anything; one without keys has sums of zero.
__device__ inline int exponent_of(float maximum) { return static_cast<int>(fminf(fmaxf(maximum, -1e8f), 1e8f)); }

// Ends the softmax of a row: what becomes of the sums of p * v, given the sum of p.
struct ExactEnd {
  float factor;
  int shift = 0;

  __device__ ExactEnd(const Problem& p, const Row& row, int kv_head, float sum, int exponent) {
    if (sum > 0 && sum < INFINITY) {
      shift = exponent + static_cast<int>(__float_as_uint(sum) >> 23) - 127;
      sum = __uint_as_float((__float_as_uint(sum) & 0x7fffffu) | 0x3f800000u);  // in [1, 2)
    }
    factor = finish_row(p, row, kv_head, sum == 0 ? -INFINITY : static_cast<float>(shift), sum);
  }
  __device__ float of(float number, int exponent) const { return ldexpf(number, exponent - shift) * factor; }
};

// Of a row: four columns of the sum of p * v, and the sum of p.  A thread's own, so that no other waits for it.
struct alignas(16) ExactQuad {
  ExactSum<4> values;
  ExactSum<1> total;

  static constexpr int kAtOnce = 2, kItems = 1;  // as of a Quad

  static __device__ ExactQuad empty() {
    ExactQuad x;
    x.clear();
    return x;
  }
  // Where a block leaves it.
  static __device__ ExactQuad& at(const Problem& p, int slot, int r, int quad) {
    auto* records = reinterpret_cast<ExactQuad*>(p.partial);
    return records[(static_cast<int64_t>(slot) * p.rows + r) * (p.pitch / 4) + quad];
  }
  // Past the L1: other blocks of this kernel may have written it.
  static __device__ ExactQuad load(const Problem& p, int slot, int r, int quad) {
    ExactQuad x;
    const auto* from = reinterpret_cast<const float4*>(&at(p, slot, r, quad));
#pragma unroll
    for (unsigned i = 0; i < sizeof(ExactQuad) / 16; ++i) reinterpret_cast<float4*>(&x)[i] = __ldcg(from + i);
    return x;
  }

  __device__ void clear() {
    values.clear();
    total.clear();
  }

  // The result of a chunk, below 2^maximum.
  __device__ void add(float4 o, float sum, float maximum) {
    if (sum == 0) return;  // nothing was seen: of what is NaN the maximum may be -inf, too
    const int exponent = exponent_of(maximum);
    values.add({o.x, o.y, o.z, o.w}, exponent);
    total.add({sum}, exponent);
  }

  __device__ void add(const ExactQuad& other) {
    values.add(other.values);
    total.add(other.total);
  }

  __device__ ExactQuad of_lane(int m) const { return {values.of_lane(m), total.of_lane(m)}; }

  // Ends the softmax of the row, of which these are four columns.
  __device__ float4 finish(const Problem& p, const Row& row, int kv_head) const {
    const ExactEnd end(p, row, kv_head, total.number(0), total.exponent());
    const int exponent = values.exponent();
    return {end.of(values.number(0), exponent), end.of(values.number(1), exponent), end.of(values.number(2), exponent),
            end.of(values.number(3), exponent)};
  }
};

// Adds up the parts of a chunk, one after another: maximum (a whole number, base 2), sum, and four columns.
struct PartsOfChunk {
  float maximum = -INFINITY, sum = 0;
  float4 o = {0, 0, 0, 0};

  __device__ void add(float2 stats, float4 x) {
    if (stats.y == 0) return;
    const float top = fmaxf(maximum, stats.x);
    const float old = power_of_2(maximum - top), weight = power_of_2(stats.x - top);
    maximum = top;
    sum = fmaf(stats.y, weight, sum * old);
    o = {fmaf(x.x, weight, o.x * old), fmaf(x.y, weight, o.y * old), fmaf(x.z, weight, o.z * old),
         fmaf(x.w, weight, o.w * old)};
  }
};

// An index that the compiler does not know, so that what it selects lies in memory.
__device__ inline int hidden(int index) {
  asm("" : "+r"(index));
  return index;
}

struct FinishedQuad {
  float4 x;
  bool is_finished;
};

// What a chunk gave for four columns of a row: maximum (base 2) and sum, and the columns.
struct ChunkQuad {
  float2 stats{-INFINITY, 0};
  float4 o{0, 0, 0, 0};
};

// Adds what one or two chunks gave for four columns of row r to what the same thread keeps of those before, or to nothing
// if it keeps none yet.  At the end of the block's part that becomes its piece, unless the block has the whole segment.
inline __device__ __noinline__ FinishedQuad add_chunks(const Problem& p, const Unit& u, const Row& row, int r, int quad,
                                                       const ChunkQuad& one, const ChunkQuad& two, bool keeps,
                                                       ExactQuad& kept) {
  ExactQuad now = ExactQuad::empty();
  if (keeps) now = kept;
  now.add(one.o, one.stats.y, one.stats.x);
  now.add(two.o, two.stats.y, two.stats.x);
  if (u.ends && u.slot < 0) return {now.finish(p, row, u.kv_head), true};
  (u.ends ? ExactQuad::at(p, u.slot, r, quad) : kept) = now;
  return {two.o, false};
}

}  // namespace pykv::attention
