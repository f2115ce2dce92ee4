// Four query rows against one tile of keys: the inner loops of CPU attention.
//
// A quad is four query rows of one KV head (heads of a group, or neighbouring queries).  Each vector of K or V that is
// loaded serves all four, so a loop does 16 multiply-adds for 8 loads and 16 sums live in registers.  Scores are kept
// as [key][row of the quad], so one vector holds the scores of kKeys keys and softmax runs on whole vectors.  A quad with
// fewer rows (few query heads for a KV head) leaves the products of the others out: kUsed are there.
//
// Arrays of sums must be unrolled entirely, or they live in memory; GCC does not do it of itself in longer loops.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "cpu/code_table.h"
#include "cpu/prefetch.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA::attention {

using Ints = int32_t __attribute__((vector_size(4 * kWidth)));

inline constexpr int kQuad = 4;
inline constexpr int kKeys = kWidth / kQuad;
inline constexpr int kTile = 32;  // keys; a multiple of kKeys
inline constexpr float kNegInf = -__builtin_inff();

// One row pointer for each key of a tile, rounded up to kKeys.  Keys that must not be read have a row of zeros.
template <class T>
using RowPointers = const T* const*;

// Elements of a and b in turn, kStep at a time, from the lower (kFrom = 0) or upper (2) half of each four.
template <int kStep, int kFrom, int... I>
inline Floats unpack(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & kStep ? kWidth : 0) + (I & ~3) + kFrom + I % 4 / (2 / kStep) % 2)...);
}

// Lane i of the result has a[i] + a[i ^ kStep] if i lacks the bit kStep, else the same of b.
template <int kStep, int... I>
inline Floats add_pairs(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & kStep ? kWidth + I : I)...) +
         __builtin_shufflevector(a, b, (I & kStep ? kWidth + (I ^ kStep) : I ^ kStep)...);
}

// Lane i of the result is the sum over the lanes of v[i].  Inlined, so that these stay in registers.
template <int kStep = 1>
[[gnu::always_inline]] inline Floats sum_each(const Floats* v) {
  if constexpr (kStep == kWidth) {
    return v[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kWidth>();
    Floats halves[kWidth / kStep / 2];
    for (int i = 0; i < kWidth / kStep / 2; ++i) {
      const Floats a = v[2 * i], b = v[2 * i + 1];
      if constexpr (kStep < 4) {
        halves[i] = unpack<kStep, 0>(a, b, lanes) + unpack<kStep, 2>(a, b, lanes);
      } else {
        halves[i] = add_pairs<kStep>(a, b, lanes);
      }
    }
    return sum_each<2 * kStep>(halves);
  }
}

template <int kStep, int... I>
inline Floats swap_lanes(Floats v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ kStep)...);
}

// Combines the lanes of one row of the quad; every lane of that row gets the result.
template <int kStep = kQuad, class Combine>
inline Floats over_keys(Floats v, Combine combine) {
  if constexpr (kStep == kWidth) {
    return v;
  } else {
    return over_keys<2 * kStep>(combine(v, swap_lanes<kStep>(v, std::make_integer_sequence<int, kWidth>())), combine);
  }
}

// Four values, one for each row of the quad, repeated over the keys of a vector.
template <class V, class E>
inline V repeat_quad(const E* four) {
  V v;
  for (int i = 0; i < kWidth; ++i) v[i] = four[i % kQuad];
  return v;
}

// What will be needed soon: pieces of memory, asked for in the order of addresses and into the second level cache, which
// takes many more requests at a time than the first.  A few with each step of a loop: those that come when too many are
// under way are dropped, which costs far more than a slower loop does.
class Fetch {
 public:
  void add(const void* first, int64_t bytes) {
    const char* const begin = static_cast<const char*>(first);
    begin_[count_] = begin;
    end_[count_++] = begin + bytes;
  }

  // The place in the pieces.  A loop works on a copy, which then stays in registers.
  struct Cursor {
    const Fetch* fetch;
    int piece;
    const char *next, *end;

    void ahead(int64_t bytes) {
      for (; bytes > 0 && piece < fetch->count_; bytes -= 64) {
        prefetch<2>(next);
        next += 64;
        if (next >= end && ++piece < fetch->count_) next = fetch->begin_[piece], end = fetch->end_[piece];
      }
    }
  };
  Cursor cursor() const { return {this, 0, count_ ? begin_[0] : nullptr, count_ ? end_[0] : nullptr}; }

 private:
  int count_ = 0;
  const char *begin_[kTile], *end_[kTile];
};

// scores[key][row] = q[row] . keys[key].
template <int kUsed, class T>
inline void score_quad(const float* q, RowPointers<T> keys, Fetch::Cursor& fetch, int count, int dims, float* scores) {
  Fetch::Cursor cursor = fetch;
  for (int j = 0; j < count; j += kKeys) {
    Floats sums[kWidth] = {};
    for (int d = 0; d < dims; d += kWidth) {
      cursor.ahead(kKeys * kWidth * sizeof(T));
      Floats k[kKeys];
      for (int i = 0; i < kKeys; ++i) k[i] = load(keys[j + i] + d);
      for (int r = 0; r < kUsed; ++r) {
        const Floats qr = load(q + r * dims + d);
        for (int i = 0; i < kKeys; ++i) sums[i * kQuad + r] += qr * k[i];
      }
    }
    store(scores + j * kQuad, sum_each(sums));
  }
  fetch = cursor;
}

template <int kVectors, int kUsed, class T>
inline void accumulate_columns(const float* p, RowPointers<T> values, Fetch::Cursor& fetch, int count, int dims, int d,
                               const float* decay, float* acc) {
  const FloatLoader<T> floats;
  Fetch::Cursor cursor = fetch;
  Floats sums[kUsed][kVectors];
#pragma GCC unroll kQuad
  for (int r = 0; r < kUsed; ++r)
    for (int i = 0; i < kVectors; ++i) sums[r][i] = load(acc + r * dims + d + i * kWidth) * decay[r];
  for (int j = 0; j < count; ++j) {
    cursor.ahead(kVectors * kWidth * sizeof(T));
    Floats v[kVectors];
    floats(values[j] + d, v);
#pragma GCC unroll kQuad
    for (int r = 0; r < kUsed; ++r) {
      const Floats pr = splat(p[j * kQuad + r]);
      for (int i = 0; i < kVectors; ++i) sums[r][i] += pr * v[i];
    }
  }
#pragma GCC unroll kQuad
  for (int r = 0; r < kUsed; ++r)
    for (int i = 0; i < kVectors; ++i) store(acc + r * dims + d + i * kWidth, sums[r][i]);
  fetch = cursor;
}

// acc[row] = acc[row] * decay[row] + sum over keys of p[key][row] * values[key].
template <int kUsed, class T>
inline void accumulate_quad(const float* p, RowPointers<T> values, Fetch::Cursor& fetch, int count, int dims,
                            const float* decay, float* acc) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;
  int d = 0;
  for (; d + kVectors * kWidth <= dims; d += kVectors * kWidth)
    accumulate_columns<kVectors, kUsed>(p, values, fetch, count, dims, d, decay, acc);
  for (; d < dims; d += kWidth) accumulate_columns<1, kUsed>(p, values, fetch, count, dims, d, decay, acc);
}

// What turns a dot product into a logit, and which keys each row of a quad sees.
struct QuadMask {
  float softcap;                    // 0: none
  float slopes[kQuad];              // ALiBi; 0: none
  int32_t distance[kQuad];          // first key of the tile - position of the row
  int32_t low[kQuad], high[kQuad];  // keys of the tile that the row sees: low <= key < high
};

inline Ints key_of_lane() {
  Ints key;
  for (int i = 0; i < kWidth; ++i) key[i] = i / kQuad;
  return key;
}

// softcap * tanh(x / softcap), to a few units in the last place however small x / softcap is.
inline Floats cap(Floats x, float softcap) {
  const Floats y = x / softcap, square = y * y;
  // Taylor's series to y^7; the rest is below 4e-7 of the value.
  const Floats series = x * (1.0f - square * (0.333333333f - square * (0.133333333f - square * 0.0539682540f)));
  return square < 0.0625f ? series : softcap * tanh(y);
}

inline void mask_quad(const QuadMask& mask, int count, float* scores) {
  const Floats slopes = repeat_quad<Floats>(mask.slopes);
  const Ints distance = repeat_quad<Ints>(mask.distance);
  const Ints low = repeat_quad<Ints>(mask.low), high = repeat_quad<Ints>(mask.high);
  for (int j = 0; j < count; j += kKeys) {
    const Ints key = key_of_lane() + j;
    Floats x = load(scores + j * kQuad);
    if (mask.softcap > 0) x = cap(x, mask.softcap);
    x += slopes * __builtin_convertvector(key + distance, Floats);
    x = ((key >= low) & (key < high)) ? x : splat(kNegInf);
    store(scores + j * kQuad, x);
  }
}

// The running softmax of a quad: lane i belongs to row i % kQuad.
struct QuadSoftmax {
  Floats top, total;  // greatest logit so far, sum of exp(logit - top)
};

// scores become exp(score - top); decay is what older sums must be multiplied with.
inline void softmax_quad(QuadSoftmax& state, int count, float* scores, float* decay) {
  Floats top = state.top;
  for (int j = 0; j < count; j += kKeys) top = max(load(scores + j * kQuad), top);
  top = over_keys(top, [](Floats a, Floats b) { return max(a, b); });
  const Floats shift = top == kNegInf ? Floats{} : top;  // no number seen yet: exp(-inf - 0) = 0, and NaN stays NaN
  Floats total{};
  for (int j = 0; j < count; j += kKeys) {
    const Floats p = exp(load(scores + j * kQuad) - shift);
    store(scores + j * kQuad, p);
    total += p;
  }
  const Floats old = exp(state.top - shift);
  state.total = state.total * old + over_keys(total, [](Floats a, Floats b) { return a + b; });
  state.top = top;
  for (int r = 0; r < kQuad; ++r) decay[r] = old[r];
}

// Rows of a cache as floats, `dims` of `size` with zeros behind.
template <class T>
inline void widen_rows(RowPointers<T> rows, Fetch::Cursor& fetch, int count, int size, int dims, float* to) {
  for (int j = 0; j < count; ++j) {
    fetch.ahead(size * sizeof(T));
    for (int d = 0; d < dims; d += kWidth) store(to + j * dims + d, load(rows[j] + d, size - d));
  }
}

}  // namespace pykv::PYKV_ISA::attention
