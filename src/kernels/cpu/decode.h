// One-byte codes times a scale, rounded to T, in bulk.
//
// A result depends on nothing but its code, and differs for the two signs in the sign alone.  For 16-bit T the results of
// all magnitudes are a table of 128 entries; AVX-512 holds it in four registers and looks up 32 codes by two permutes: a
// sixth of the instructions of the conversions and the product.
#pragma once

#include "cpu/pairs.h"

namespace pykv::PYKV_ISA {

template <class T, class Code>
class Decoder {
 public:
  explicit Decoder(float scale) : scale_(splat(scale)) {}

  void operator()(T* to, const Code* from, int64_t n) const {
    for (int64_t i = 0; i < n; i += kWidth) store(to + i, load(from + i, n - i) * scale_, n - i);
  }

  // Each times a scale of its own tile more; n is a multiple of 32.
  void tile(T* to, const Code* from, int64_t n, float scale) const {
    for (int64_t i = 0; i < n; i += kWidth) store(to + i, load(from + i) * scale_ * scale);
  }

 private:
  Floats scale_;
};

#if defined(__AVX512BW__)
template <class T, class Code>
  requires(sizeof(T) == 2 && (__is_same(Code, e4m3) || __is_same(Code, e5m2)))
class Decoder<T, Code> {
 public:
  explicit Decoder(float scale) {
    for (int i = 0; i < kCodes; i += kPair) {
      Code codes[kPair];
      for (int j = 0; j < kPair; ++j) codes[j].bits = static_cast<uint8_t>(i + j);
      const Pair<T> products = in_order<T>(load(codes), load(codes + kWidth)) * plain(scale);
      products_[i / kPair] = products;
      table_[i / kPair] = __builtin_bit_cast(__m512i, packed(products));
    }
  }

  void operator()(T* to, const Code* from, int64_t n) const {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(to + i, look_up(table_, load_raw<__m256i>(from + i)));
    if (i == n) return;
    uint8_t codes[32] = {};
    uint16_t results[32];
    __builtin_memcpy(codes, from + i, static_cast<size_t>(n - i));
    _mm512_storeu_si512(results, look_up(table_, load_raw<__m256i>(codes)));
    __builtin_memcpy(to + i, results, static_cast<size_t>(n - i) * 2);
  }

  // By a table of its own: quicker than floats from the one that there is, which all would be multiplied and rounded.
  void tile(T* to, const Code* from, int64_t n, float scale) const {
    __m512i table[kTables];
    for (int i = 0; i < kTables; ++i) table[i] = __builtin_bit_cast(__m512i, packed(products_[i] * plain(scale)));
    for (int64_t i = 0; i < n; i += 32) _mm512_storeu_si512(to + i, look_up(table, load_raw<__m256i>(from + i)));
  }

 private:
  static constexpr int kCodes = 128, kTables = kCodes / kPair;

  static __m512i look_up(const __m512i (&table)[kTables], __m256i bytes) {
    const __m512i codes = _mm512_cvtepu8_epi16(bytes);  // a permute looks at six bits
    const __m512i small = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    const __m512i large = _mm512_permutex2var_epi16(table[2], codes, table[3]);
    const __m512i magnitude =
        _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), small, large);
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(codes, 7), 15);
    return _mm512_xor_si512(magnitude, sign);
  }

  Pair<T> products_[kTables];
  __m512i table_[kTables];
};
#endif

}  // namespace pykv::PYKV_ISA
