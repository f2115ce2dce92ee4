// Elements quantised by a scale, and what such a scale is found from.
#pragma once

#include <vector>

#include "cpu/encode.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// to[i * to_dim] = f(from[i * dim]), rounded to Code.  f takes floats and vectors of them.
template <class T, class Code, class F>
void convert(Code* to, int64_t to_dim, const T* from, int64_t dim, int64_t size, F&& f) {
  if (dim == 1 && to_dim == 1) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) store(to + i, f(load(from + i)));
    if (i < size) store(to + i, f(load(from + i, size - i)), size - i);
  } else {
    for (int64_t i = 0; i < size; ++i) to[i * to_dim] = from_float<Code>(f(to_float(from[i * dim])));
  }
}

// x / scale, for results that are rounded to one byte.  A vector's division takes as long as ten other operations, hence
// two steps from the product with the reciprocal: what the first quotient leaves of x is exact, and so is the rounded sum.
class Quotient {
 public:
  explicit Quotient(float scale)
      : scale_(scale), reciprocal_(1.0f / scale), in_steps_(scale > 0x1p-80f && scale < 0x1p80f) {}

  float operator()(float x) const { return x / scale_; }
  Floats operator()(Floats x) const {
#if defined(__AVX512F__)
    if (in_steps_) {
      const __m512 scale = splat(scale_), reciprocal = splat(reciprocal_), first = x * reciprocal;
      const __m512 rest = _mm512_fnmadd_ps(first, scale, x);
      const __mmask16 finite = ~_mm512_fpclass_ps_mask(first, 0x99);  // neither an infinity nor NaN
      const __m512 quotient = _mm512_mask3_fmadd_ps(rest, reciprocal, first, finite);
      // with x's sign, which a zero has lost: 0xe4 is c ? a : b
      return __builtin_bit_cast(
          Floats, _mm512_ternarylogic_epi32(__builtin_bit_cast(__m512i, quotient), __builtin_bit_cast(__m512i, x),
                                            _mm512_set1_epi32(0x7fffffff), 0xe4));
    }
#endif
    return x / scale_;
  }

 private:
  const float scale_, reciprocal_;
  const bool in_steps_;
};

template <class T, class Code>
void quantise(Code* to, int64_t to_dim, const T* from, int64_t dim, int64_t size, float scale) {
  convert(to, to_dim, from, dim, size, Quotient(scale));
}

#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
float largest_of_neighbours(const T* from, int64_t size) {
  constexpr int16_t kInfinity = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < size; i += 32) {
    const __mmask32 inside = size - i < 32 ? (__mmask32{1} << (size - i)) - 1 : ~__mmask32{};
    const __m512i m = _mm512_and_si512(_mm512_maskz_loadu_epi16(inside, from + i), _mm512_set1_epi16(0x7fff));
    most = _mm512_mask_max_epi16(most, _mm512_cmple_epi16_mask(m, _mm512_set1_epi16(kInfinity)), most, m);
  }
  __m256i halves[2];
  __builtin_memcpy(halves, &most, sizeof most);
  const __m256i half = _mm256_max_epi16(halves[0], halves[1]);
  const __m128i eight = _mm_max_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // there is a least of eight, not a largest
  const int least = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
  return to_float(T{static_cast<uint16_t>(~least)});
}
#endif

// NaN is not counted.
template <class T>
float largest_magnitude(const T* from, int64_t dim, int64_t size) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    if (dim == 1) return largest_of_neighbours(from, size);
  }
#endif
  if (dim == 1) {
    // magnitudes have the order of their bits, and integers a maximum that is quickly had; NaN counts as 0
    Words most{};
    const auto take = [&](Floats x) {
      Words m = __builtin_bit_cast(Words, x) & 0x7fffffffu;
      m = m > 0x7f800000u ? Words{} : m;
      most = m > most ? m : most;
    };
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) take(load(from + i));
    if (i < size) take(load(from + i, size - i));
    return max(__builtin_bit_cast(Floats, most));
  }
  float most = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float v = __builtin_fabsf(to_float(from[i * dim]));
    most = v > most ? v : most;
  }
  return most;
}

// The codes of a tile, compact and a multiple of 32, that has a scale of its own: its largest magnitude, which is a finite
// number, through kLargest, or a power of two that is not less.
template <class T, int kLargest>
class TileEncoder {
 public:
  explicit TileEncoder(int64_t) {}
  void divide(e4m3* to, const T* from, int64_t n, float, float scale) const { quantise(to, 1, from, 1, n, scale); }
  void divide_by_power_of_two(e4m3* to, const T* from, int64_t n, float scale) const {
    const float reciprocal = 1.0f / scale;  // exact, and so are the products
    convert(to, 1, from, 1, n, [=](auto x) { return x * reciprocal; });
  }
};

#if defined(__AVX512BW__)
// Scales differ by a power of two where magnitudes do, so that the tables of cpu/encode.h for the 128 magnitudes of a binade
// are those for all.
template <int kLargest>
class TileEncoder<bf16, kLargest> {
 public:
  // For that many elements in all: few are not worth tables.
  explicit TileEncoder(int64_t elements) : tables_(elements >= kWorthTables ? &tables() : nullptr) {}

  void divide(e4m3* to, const bf16* from, int64_t n, float largest, float scale) const {
    if (!(tables_ && largest > kLeast && largest < kMost)) return quantise(to, 1, from, 1, n, scale);
    const uint32_t bits = __builtin_bit_cast(uint32_t, largest);
    tables_->encoders[bits >> 16 & 127].scaled(to, from, n, static_cast<int>(bits >> 23) - 127);
  }
  void divide_by_power_of_two(e4m3* to, const bf16* from, int64_t n, float scale) const {
    if (!(tables_ && scale > kLeast && scale < kMost)) {
      const float reciprocal = 1.0f / scale;
      return convert(to, 1, from, 1, n, [=](auto x) { return x * reciprocal; });
    }
    tables_->one.scaled(to, from, n, static_cast<int>(__builtin_bit_cast(uint32_t, scale) >> 23) - 127);
  }

 private:
  static constexpr int64_t kWorthTables = 1 << 18;
  static constexpr float kLeast = 0x1p-80f, kMost = 0x1p80f;

  struct Tables {
    Encoder<bf16, e4m3> one{1.0f, kWorthTables};
    std::vector<Encoder<bf16, e4m3>> encoders;
    Tables() {
      for (uint32_t i = 0; i < 128; ++i)
        encoders.emplace_back(to_float(bf16{static_cast<uint16_t>(0x3f80 + i)}) / kLargest, kWorthTables);
    }
  };
  // Made once, in a third of a millisecond.
  static const Tables& tables() {
    static const Tables tables;
    return tables;
  }

  const Tables* tables_;
};
#endif

}  // namespace pykv::PYKV_ISA
