// One-byte floats as bf16, which holds each of their values, or as floats, 64 at a time.
//
// Both bytes of the bf16 depend on the code alone, and but for the sign on its magnitude: two tables of 128 bytes, in which
// AVX512_VBMI looks all codes of a register up at once.
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

#if defined(__AVX512VBMI__)
template <class Code>
class CodeTable {
 public:
  struct Halves {
    __m512i low, high;  // bytes of the bf16, in the order of the codes
  };

  CodeTable() {
    for (int i = 0; i < 2; ++i) {
      low_[i] = load_raw<__m512i>(bytes().low + 64 * i);
      high_[i] = load_raw<__m512i>(bytes().high + 64 * i);
    }
  }

  [[gnu::always_inline]] Halves operator()(__m512i codes) const {
    constexpr int kOrAnd = 0xf8;                                               // a | (b & c)
    const __m512i high = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);  // by seven of eight bits
    return {_mm512_permutex2var_epi8(low_[0], codes, low_[1]),
            _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(-128), kOrAnd)};
  }

 private:
  struct Bytes {
    uint8_t low[128], high[128];
  };

  static const Bytes& bytes() {
    static const Bytes values = [] {
      Bytes v;
      for (int i = 0; i < 128; ++i) {
        const uint32_t bits = __builtin_bit_cast(uint32_t, to_float(Code{static_cast<uint8_t>(i)}));
        v.low[i] = static_cast<uint8_t>(bits >> 16);
        v.high[i] = static_cast<uint8_t>(bits >> 24);
      }
      return v;
    }();
    return values;
  }

  __m512i low_[2], high_[2];
};
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
  const CodeTable<e4m3> table_;
};
#endif

}  // namespace pykv::PYKV_ISA
