// Elements quantised by a scale, and what such a scale is found from.
#pragma once

#include "cpu/divisor.h"
#include "cpu/simd.h"
#include "cpu/tile_encoder.h"

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

template <class T, class Code>
void quantise(Code* to, int64_t to_dim, const T* from, int64_t dim, int64_t size, float scale) {
  convert(to, to_dim, from, dim, size, [by = Divisor(scale)](auto x) { return x / by; });
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

// The smallest power of two that is not below a positive, normal s; infinity stays what it is.
inline float power_of_two_from(float s) {
  return __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, s) + 0x7fffffu) & 0xff800000u);
}

// The codes of a compact tile that has a scale of its own: its largest magnitude, which is a finite number, through
// kLargest, or a power of two that is not less.
template <class T, int kLargest>
class TileQuantiser {
 public:
  // For that many elements in all.
  explicit TileQuantiser(int64_t elements) : encoder_(elements) {}

  void divide(e4m3* to, const T* from, int64_t n, float largest, float scale) const {
    if (!encoder_.divide(to, from, n, largest)) quantise(to, 1, from, 1, n, scale);
  }
  void divide_by_power_of_two(e4m3* to, const T* from, int64_t n, float scale) const {
    if (encoder_.divide_by_power_of_two(to, from, n, scale)) return;
    const float reciprocal = 1.0f / scale;  // exact, and so are the products
    convert(to, 1, from, 1, n, [=](auto x) { return x * reciprocal; });
  }

 private:
  TileEncoder<T, Divided<e4m3>, kLargest> encoder_;
};

}  // namespace pykv::PYKV_ISA
