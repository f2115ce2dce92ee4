// One-byte results of quantising ops: the nearest code to a number, ties to even, the last one where it is too large.
//
// Unlike in a KV cache (cpu/float16.h), NaN becomes the largest number (E4M3, E5M2) or 0 (int8).
#pragma once

#include "cpu/divisor.h"
#include "cpu/pairs.h"

namespace pykv::PYKV_ISA {

// In the lowest byte; above it there is rubbish.
inline Words quantised(e4m3, Floats v) {
  const Floats within = greater(lesser(v, splat(448.0f)), splat(-448.0f));  // NaN is the largest from here
  const Words bits = __builtin_bit_cast(Words, within);
  const Words code = narrow_finite<3, 7, 8, Floats, Words>(bits & 0x7fffffffu);
  return (code & ~0x80u) | (bits >> 24 & 0x80u);
}
inline Words quantised(e5m2, Floats v) {
  const Floats within = greater(lesser(v, splat(57344.0f)), splat(-57344.0f));  // NaN is the largest from here
  const Words bits = __builtin_bit_cast(Words, within);
  const Words code = narrow_finite<2, 15, 8, Floats, Words>(bits & 0x7fffffffu);
  return (code & ~0x80u) | (bits >> 24 & 0x80u);
}
inline Words quantised(int8_t, Floats v) {
  const Floats within = greater(lesser(v == v ? v : Floats{}, splat(127.0f)), splat(-128.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
  return __builtin_bit_cast(Words, within + 12582912.0f);
}

// Codes of numbers that are known to lie where rounding gives one.
struct InsideInt8 {
  int8_t bits;
};
inline Words quantised(InsideInt8, Floats v) {  // by no sum, which with a product before it would be one operation
#if defined(__AVX512F__)
  return __builtin_bit_cast(Words, _mm512_maskz_cvtps_epi32(0xffff, v));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Words, _mm256_cvtps_epi32(v));
#elif defined(__aarch64__)
  return __builtin_bit_cast(Words, vcvtnq_s32_f32(v));
#else
  return __builtin_bit_cast(Words, v + 12582912.0f);
#endif
}
struct InsideE4M3 {
  uint8_t bits;
};
inline Words quantised(InsideE4M3, Floats v) {
  const Words bits = __builtin_bit_cast(Words, v);
  return narrow_finite<3, 7, 8, Floats, Words>(bits & 0x7fffffffu) | (bits >> 24 & 0x80u);
}

template <class Code>
inline void store_quantised(Code* to, Floats v, int64_t count) {
  const Bytes codes = narrow_to_bytes(quantised(Code{}, v) & 0xffu);
  if (count >= kWidth) {
    __builtin_memcpy(to, &codes, sizeof codes);
  } else {
    __builtin_memcpy(to, &codes, static_cast<size_t>(count));
  }
}

template <class Code, class T>
inline void store_quantised(Code* to, Pair<T> v, int64_t count, [[maybe_unused]] bool past = false) {
#if defined(__AVX512BW__)
  if constexpr (kAlternating<T>) {
    const Words even = quantised(Code{}, v.x), odd = quantised(Code{}, v.y);
    const __m512i both =
        _mm512_mask_blend_epi16(0xaaaaaaaa, __builtin_bit_cast(__m512i, even), __builtin_bit_cast(__m512i, odd << 16));
    const __m256i codes = _mm512_maskz_cvtepi16_epi8(~__mmask32{}, both);
    return store_codes(to, codes, count, past);
  }
#endif
  const Pair<float> neighbours = in_memory_order(v);
  store_quantised(to, neighbours.x, count);
  if (count > kWidth) store_quantised(to + kWidth, neighbours.y, count - kWidth);
}

template <class T>
inline Pair<T> operator/(Pair<T> v, const Divisor& by) {
  return {v.x / by, v.y / by};
}

// The rule of static scales (cpu/encode.h): times the inverse of the scale.
struct TimesInverse {
  static constexpr uint8_t kNan = 0x7e;
  static constexpr bool kNanHasSign = false;
  float inverse;

  explicit TimesInverse(float scale) : inverse(1.0f / scale) {}
  e4m3 code(float v) const {
    const float y = v * inverse;
    return from_float<e4m3>(y < 448.0f ? y : 448.0f);
  }
  void store(e4m3* to, Floats v, int64_t count) const { store_quantised(to, v * inverse, count); }
};

// That of scales that are made of what they divide.
struct ByLargest {
  static constexpr uint8_t kNan = 0x7e;
  static constexpr bool kNanHasSign = false;
  float scale;

  e4m3 code(float v) const {
    const float y = v / scale;
    return from_float<e4m3>(y < 448.0f ? y : 448.0f);
  }
  void store(e4m3* to, Floats v, int64_t count) const { store_quantised(to, v / scale, count); }
};

}  // namespace pykv::PYKV_ISA
