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
  static constexpr bool kStreams = false;  // past the caches, if asked to

  explicit Decoder(float scale) : scale_(splat(scale)) {}

  void operator()(T* to, const Code* from, int64_t n, bool = false) const {
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
  static constexpr int kCodes = 128, kVectors = kCodes / kPair;
  using Products = Pair<T>[kVectors];

 public:
  static constexpr bool kStreams = true;

  explicit Decoder(float scale) {
    for (int i = 0; i < kCodes; i += kPair) {
      Code codes[kPair];
      for (int j = 0; j < kPair; ++j) codes[j].bits = static_cast<uint8_t>(i + j);
      products_[i / kPair] = in_order<T>(load(codes), load(codes + kWidth)) * plain(scale);
    }
    table_ = table_of(products_);
  }

  void operator()(T* to, const Code* from, int64_t n, bool past = false) const { look_up(table_, to, from, n, past); }

  // By a table of its own, where each product would take several operations to be rounded.
  void tile(T* to, const Code* from, int64_t n, float scale) const {
    Products own;
    for (int i = 0; i < kVectors; ++i) own[i] = products_[i] * plain(scale);
    look_up(table_of(own), to, from, n, false);
  }

 private:
  struct Table {
    __m512i of[kVectors];
  };

  static Table table_of(const Products& products) {
    Table table;
    for (int i = 0; i < kVectors; ++i) table.of[i] = __builtin_bit_cast(__m512i, packed(products[i]));
    return table;
  }

  static void look_up(const Table& table, T* to, const Code* from, int64_t n, bool past) {
    int64_t i = 0;
    for (; i + kPair <= n; i += kPair) store_raw(to + i, look_up(table, load_raw<__m256i>(from + i)), past);
    if (i == n) return;
    uint8_t codes[kPair] = {};
    uint16_t results[kPair];
    __builtin_memcpy(codes, from + i, static_cast<size_t>(n - i));
    _mm512_storeu_si512(results, look_up(table, load_raw<__m256i>(codes)));
    __builtin_memcpy(to + i, results, static_cast<size_t>(n - i) * 2);
  }

  static __m512i look_up(const Table& table, __m256i bytes) {
    const __m512i codes = _mm512_cvtepu8_epi16(bytes);  // a permute looks at six bits
    const __m512i small = _mm512_permutex2var_epi16(table.of[0], codes, table.of[1]);
    const __m512i large = _mm512_permutex2var_epi16(table.of[2], codes, table.of[3]);
    const __m512i magnitude =
        _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), small, large);
    const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(codes, 7), 15);
    return _mm512_xor_si512(magnitude, sign);
  }

  Products products_;
  Table table_;
};
#endif

}  // namespace pykv::PYKV_ISA
