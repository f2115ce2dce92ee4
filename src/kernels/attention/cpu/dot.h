// The inner loops of CPU attention for bf16, where the CPU multiplies pairs of bf16 and adds them up in float
// (AVX512_BF16): half the instructions of the float loops, and nothing to convert.  Keys of one byte become bf16, which
// holds each of their values.
//
// The values are accumulated so where arithmetic decides (many query rows).  As on GPUs, the weights p are rounded to bf16
// before they meet the values then, which is an error of some 1.6e-3; their sum is that of the exact ones.
#pragma once

#include "attention/cpu/tile.h"

namespace pykv::PYKV_ISA::attention {

#if !defined(__AVX512BF16__)

inline constexpr bool kBf16Dot = false;

#else

inline constexpr bool kBf16Dot = true;
inline constexpr int kPairs = 2 * kWidth;  // elements of bf16 in a vector

// Loads some vectors of bf16, which holds each value of a one-byte cache, too.
template <class T>
class PairLoader {
 public:
  template <int kVectors>
  [[gnu::always_inline]] void operator()(const T* from, __m512bh (&to)[kVectors]) const {
    for (int i = 0; i < kVectors; ++i, from += kPairs) {
      if constexpr (std::is_same_v<T, bf16>) {
        to[i] = load_raw<__m512bh>(from);
      } else {
        to[i] = _mm512_cvtne2ps_pbh(load(from + kWidth), load(from));
      }
    }
  }
};

template <class T>
  requires(std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>)
class PairLoader<T> {
 public:
  template <int kVectors>
  [[gnu::always_inline]] void operator()(const T* from, __m512bh (&to)[kVectors]) const {
    constexpr __mmask64 kCodes = ~__mmask64{} >> (2 - kVectors) * kPairs;
    __m512i both[2];
    table_.in_order(_mm512_maskz_loadu_epi8(kCodes, from), both);
    for (int i = 0; i < kVectors; ++i) to[i] = (__m512bh)both[i];
  }

 private:
  const CodeTable table_ = bf16_table<T>();
};

// sums[key][row] += q[row] . keys[key] over dimensions d ... d + kVectors * kPairs.
template <int kUsed, int kVectors, class T>
inline void add_products(const PairLoader<T>& pairs, const bf16* q, RowPointers<T> keys, int dims, int d,
                         Floats (&sums)[kWidth]) {
  constexpr int kTogether = 2;  // keys that each vector of q serves: more want more registers than there are
#pragma GCC unroll kQuad
  for (int i = 0; i < kKeys; i += kTogether) {
    __m512bh k[kTogether][kVectors];
    for (int n = 0; n < kTogether; ++n) pairs(keys[i + n] + d, k[n]);
#pragma GCC unroll kQuad
    for (int r = 0; r < kUsed; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        const __m512bh qr = load_raw<__m512bh>(q + r * dims + d + v * kPairs);
        for (int n = 0; n < kTogether; ++n) {
          Floats& sum = sums[(i + n) * kQuad + r];
          sum = _mm512_dpbf16_ps(sum, qr, k[n][v]);
        }
      }
    }
  }
}

// scores[key][row] = scale * q[row] . keys[key].
template <int kUsed, class T>
inline void score_quad_dot(const bf16* q, float scale, RowPointers<T> keys, Fetch::Cursor& fetch, int count, int dims,
                           float* scores) {
  const PairLoader<T> pairs;
  Fetch::Cursor cursor = fetch;
  for (int j = 0; j < count; j += kKeys) {
    Floats sums[kWidth] = {};
    int d = 0;
    for (; d + 2 * kPairs <= dims; d += 2 * kPairs) {
      cursor.ahead(kKeys * 2 * kPairs * sizeof(T));
      add_products<kUsed, 2>(pairs, q, keys + j, dims, d, sums);
    }
    if (d < dims) {
      cursor.ahead(kKeys * kPairs * sizeof(T));
      add_products<kUsed, 1>(pairs, q, keys + j, dims, d, sums);
    }
    store(scores + j * kQuad, sum_each(sums) * scale);
  }
  fetch = cursor;
}

// Rows of a one-byte cache as bf16.
template <class T>
inline void narrow_rows(RowPointers<T> rows, Fetch::Cursor& fetch, int count, int dims, bf16* to) {
  const PairLoader<T> pairs;
  for (int j = 0; j < count; ++j, to += dims) {
    fetch.ahead(dims * sizeof(T));
    for (int d = 0; d < dims; d += kPairs) {
      __m512bh one[1];
      pairs(rows[j] + d, one);
      __builtin_memcpy(to + d, one, sizeof(one));
    }
  }
}

// pairs[key / 2][row] = p[key][row] and p[key + 1][row] as bf16, side by side.  count is a multiple of kKeys.
inline void pair_weights(const float* p, int count, uint32_t* pairs) {
  for (int j = 0; j < count; j += 2 * kKeys) {
    const Words first = narrow_bf16<Floats, Words>(load(p + j * kQuad));
    const Words second = j + kKeys < count ? narrow_bf16<Floats, Words>(load(p + (j + kKeys) * kQuad)) : Words{};
    const Words even = __builtin_shufflevector(first, second, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const Words odd =
        __builtin_shufflevector(first, second, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const Words both = even | (odd << 16);
    __builtin_memcpy(pairs + j / 2 * kQuad, &both, sizeof(both));
  }
}

// acc[row] = acc[row] * decay[row] + sum over keys of p[key][row] * values[key].
//
// The values of two keys are interleaved within lanes of 128 bits, so in each 32 elements of acc these come first:
// 0-3, 8-11, 16-19, 24-27; then the others.
template <int kVectors>
inline void accumulate_pairs(const uint32_t* pairs, RowPointers<bf16> values, int count, int dims, int d,
                             const float* decay, float* acc) {
  Floats sums[kQuad][2 * kVectors];
  for (int r = 0; r < kQuad; ++r)
    for (int i = 0; i < 2 * kVectors; ++i) sums[r][i] = load(acc + r * dims + d + i * kWidth) * decay[r];
  for (int j = 0; j < count; j += 2) {
    __m512bh v[2 * kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const __m512i first = load_raw<__m512i>(values[j] + d + i * kPairs);
      const __m512i second = load_raw<__m512i>(values[j + 1] + d + i * kPairs);
      v[2 * i] = (__m512bh)_mm512_unpacklo_epi16(first, second);
      v[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(first, second);
    }
    for (int r = 0; r < kQuad; ++r) {
      const __m512bh weights = (__m512bh)_mm512_set1_epi32(pairs[j / 2 * kQuad + r]);
      for (int i = 0; i < 2 * kVectors; ++i) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], weights, v[i]);
    }
  }
  for (int r = 0; r < kQuad; ++r)
    for (int i = 0; i < 2 * kVectors; ++i) store(acc + r * dims + d + i * kWidth, sums[r][i]);
}

inline void accumulate_quad_dot(const float* p, RowPointers<bf16> values, int count, int dims, const float* decay,
                                float* acc) {
  uint32_t pairs[(kTile + 2 * kKeys) / 2 * kQuad];
  pair_weights(p, count, pairs);
  int d = 0;
  for (; d + 2 * kPairs <= dims; d += 2 * kPairs) accumulate_pairs<2>(pairs, values, count, dims, d, decay, acc);
  for (; d < dims; d += kPairs) accumulate_pairs<1>(pairs, values, count, dims, d, decay, acc);
}

// Puts a row of acc back into the order of dimensions.
inline void restore_order(float* row, int dims) {
  for (int d = 0; d < dims; d += kPairs) {
    const Floats low = load(row + d), high = load(row + d + kWidth);
    store(row + d, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(row + d + kWidth,
          __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
}

#endif

}  // namespace pykv::PYKV_ISA::attention
