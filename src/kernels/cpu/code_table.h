// What one-byte codes stand for, 64 at a time, with AVX512_VBMI: as 16-bit numbers, or floats.
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

#if defined(__AVX512VBMI__)
// Results of 16 bits that depend on the code alone and, but for the sign, on its magnitude: two tables of 128 bytes, in which one
// instruction each looks all codes of a register up.
class CodeTable {
 public:
  static constexpr int kMagnitudes = 128;
  struct Bytes {
    __m512i low, high;  // of the results, in the order of the codes
  };

  CodeTable() = default;
  explicit CodeTable(const uint16_t (&results)[kMagnitudes]) {
    alignas(64) uint8_t low[kMagnitudes], high[kMagnitudes];
    for (int i = 0; i < kMagnitudes; ++i) {
      low[i] = static_cast<uint8_t>(results[i]);
      high[i] = static_cast<uint8_t>(results[i] >> 8);
    }
    for (int i = 0; i < 2; ++i) {
      low_[i] = load_raw<__m512i>(low + 64 * i);
      high_[i] = load_raw<__m512i>(high + 64 * i);
    }
  }

  [[gnu::always_inline]] Bytes operator()(__m512i codes) const {
    constexpr int kXorAnd = 0x78;  // a ^ (b & c)
    const __m512i high =
        _mm512_maskz_permutex2var_epi8(~__mmask64{}, high_[0], codes, high_[1]);  // by seven of eight bits
    return {_mm512_maskz_permutex2var_epi8(~__mmask64{}, low_[0], codes, low_[1]),
            _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(-128), kXorAnd)};
  }

  // The results of the first 32 codes, and of the others.
  [[gnu::always_inline]] void in_order(__m512i codes, __m512i (&results)[2]) const {
    // Eight by eight codes change places first, so that they lie in order when their bytes have been put together.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const auto [low, high] = (*this)(_mm512_maskz_permutexvar_epi64(0xff, order, codes));
    results[0] = _mm512_maskz_unpacklo_epi8(~__mmask64{}, low, high);
    results[1] = _mm512_maskz_unpackhi_epi8(~__mmask64{}, low, high);
  }

 private:
  __m512i low_[2], high_[2];
};

// As bf16, which holds each value of a one-byte float.
template <class Code>
const CodeTable& bf16_table() {
  static const CodeTable table = [] {
    uint16_t results[CodeTable::kMagnitudes];
    for (int i = 0; i < CodeTable::kMagnitudes; ++i) {
      const float value = to_float(Code{static_cast<uint8_t>(i)});
      results[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
    }
    return CodeTable(results);
  }();
  return table;
}
#endif

// Loads some vectors of floats; an object, to have what it looks up in registers while a loop runs.
template <class T>
class FloatLoader {
 public:
  template <int kVectors>
  [[gnu::always_inline]] void operator()(const T* from, Floats (&to)[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) to[i] = load(from + i * kWidth);
  }
};

#if defined(__AVX512VBMI__)
// For e5m2 the conversion of halves is as quick.
template <>
class FloatLoader<e4m3> {
 public:
  template <int kVectors>
  [[gnu::always_inline]] void operator()(const e4m3* from, Floats (&to)[kVectors]) const {
    if constexpr (kVectors == 4) {
      // Four by four elements change places first, so that they lie in order when their bytes have been put together.
      const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const auto [low, high] = table_(_mm512_maskz_permutexvar_epi32(0xffff, order, load_raw<__m512i>(from)));
      const __m512i zero = _mm512_setzero_si512();
      const __m512i halves[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
      to[0] = __builtin_bit_cast(Floats, _mm512_unpacklo_epi16(zero, halves[0]));
      to[1] = __builtin_bit_cast(Floats, _mm512_unpackhi_epi16(zero, halves[0]));
      to[2] = __builtin_bit_cast(Floats, _mm512_unpacklo_epi16(zero, halves[1]));
      to[3] = __builtin_bit_cast(Floats, _mm512_unpackhi_epi16(zero, halves[1]));
    } else {
      for (int i = 0; i < kVectors; ++i) to[i] = load(from + i * kWidth);
    }
  }

 private:
  const CodeTable table_ = bf16_table<e4m3>();
};
#endif

}  // namespace pykv::PYKV_ISA
