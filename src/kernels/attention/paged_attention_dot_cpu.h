// The inner loops of CPU attention for bf16, where the CPU multiplies pairs of bf16 and adds them up in float
// (AVX512_BF16): half the instructions of the float loops, and nothing to convert.
//
// The values are accumulated so where arithmetic decides (many query rows).  As on GPUs, the weights p are rounded to bf16
// before they meet the values then; their sum is that of the exact ones.
#pragma once

#include "attention/paged_attention_tile_cpu.h"

namespace pykv::PYKV_ISA::attention {

#if !defined(__AVX512F__)

inline bool has_bf16_dot() { return false; }

#else

// These functions alone are compiled for it, and called where the CPU has it.
#define PYKV_DOT __attribute__((target("avx512bf16")))

inline bool has_bf16_dot() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}

inline constexpr int kPairs = 2 * kWidth;  // elements of bf16 in a vector

PYKV_DOT inline __m512bh load_pairs(const bf16* from) { return load_raw<__m512bh>(from); }

// scores[key][row] = scale * q[row] . keys[key].
PYKV_DOT inline void score_quad_dot(const bf16* q, float scale, RowPointers<bf16> keys, Fetch::Cursor& fetch, int count,
                                    int dims, float* scores) {
  Fetch::Cursor cursor = fetch;
  for (int j = 0; j < count; j += kKeys) {
    Floats sums[kWidth] = {};
    for (int d = 0; d < dims; d += kPairs) {
      cursor.ahead(kKeys * kPairs * sizeof(bf16));
      __m512bh k[kKeys];
      for (int i = 0; i < kKeys; ++i) k[i] = load_pairs(keys[j + i] + d);
      for (int r = 0; r < kQuad; ++r) {
        const __m512bh qr = load_pairs(q + r * dims + d);
        for (int i = 0; i < kKeys; ++i) sums[i * kQuad + r] = _mm512_dpbf16_ps(sums[i * kQuad + r], qr, k[i]);
      }
    }
    store(scores + j * kQuad, sum_each(sums) * scale);
  }
  fetch = cursor;
}

// Rows of a one-byte cache as bf16, which holds each of their values.
template <class T>
PYKV_DOT inline void narrow_rows(RowPointers<T> rows, Fetch::Cursor& fetch, int count, int dims, bf16* to) {
  for (int j = 0; j < count; ++j, to += dims) {
    fetch.ahead(dims * sizeof(T));
    for (int d = 0; d < dims; d += kPairs) {
      const __m512bh both = _mm512_cvtne2ps_pbh(load(rows[j] + d + kWidth), load(rows[j] + d));
      __builtin_memcpy(to + d, &both, sizeof(both));
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
PYKV_DOT inline void accumulate_pairs(const uint32_t* pairs, RowPointers<bf16> values, int count, int dims, int d,
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

PYKV_DOT inline void accumulate_quad_dot(const float* p, RowPointers<bf16> values, int count, int dims,
                                         const float* decay, float* acc) {
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

#undef PYKV_DOT
#endif

}  // namespace pykv::PYKV_ISA::attention
