// Vectors of floats, as wide as the instruction set this file is compiled for, built on GCC's vector extensions:
// arithmetic, comparisons and ?: are the compiler's own, so only what has no operator is here.
#pragma once

#include <cstdint>

#include "cpu/float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pykv::PYKV_ISA {

#if defined(__AVX512F__)
inline constexpr int kWidth = 16;
#elif defined(__AVX2__)
inline constexpr int kWidth = 8;
#else
inline constexpr int kWidth = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));
using Integers = int32_t __attribute__((vector_size(4 * kWidth)));
using Halfwords = uint16_t __attribute__((vector_size(2 * kWidth)));
using Bytes = uint8_t __attribute__((vector_size(kWidth)));

inline Floats converted(Integers v) { return __builtin_convertvector(v, Floats); }

inline Floats splat(float v) { return v - Floats{}; }  // v + 0 would not be -0 for v = -0, and costs an addition
inline Floats select(Words mask, Floats a, Floats b) { return mask ? a : b; }

// NaN in `a` gives `b`, as the machine's own max and min do.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

inline Floats sqrt(Floats v) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(0xffff, v);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(v);
#else
  for (int i = 0; i < kWidth; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

template <class V, class T>
inline V load_raw(const T* from) {  // no alignment is assumed anywhere
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

// Lane i is lane lanes[i] of a and b side by side; `lanes` are known where this is compiled.
template <class V, class Lanes>
[[gnu::always_inline]] inline V shuffle(V a, V b, Lanes lanes) {
#if defined(__clang__)
  constexpr int kLanes = sizeof(V) / sizeof(a[0]);
  V result;
  for (int i = 0; i < kLanes; ++i) result[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return result;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Integers widened to 32 bits and cut again.  GCC 12's __builtin_convertvector takes bytes one by one, hence
// intrinsics.
inline Words widen(Halfwords v) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Words,
                            _mm512_maskz_cvtepu16_epi32(0xffff, __builtin_bit_cast(__m256i, v)));  // plain: warns
#elif defined(__AVX2__)
  return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(__builtin_bit_cast(__m128i, v)));
#else
  return __builtin_convertvector(v, Words);
#endif
}
inline Words widen(Bytes v) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Words, _mm512_maskz_cvtepu8_epi32(0xffff, __builtin_bit_cast(__m128i, v)));
#elif defined(__AVX2__)
  return __builtin_bit_cast(Words, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(__builtin_bit_cast(long long, v))));
#else
  return __builtin_convertvector(v, Words);
#endif
}
inline Halfwords narrow_to_halfwords(Words v) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Halfwords, _mm512_maskz_cvtepi32_epi16(0xffff, __builtin_bit_cast(__m512i, v)));
#else
  return __builtin_convertvector(v, Halfwords);
#endif
}
inline Bytes narrow_to_bytes(Words v) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(Bytes, _mm512_maskz_cvtepi32_epi8(0xffff, __builtin_bit_cast(__m512i, v)));
#else
  return __builtin_convertvector(v, Bytes);
#endif
}

// kWidth elements as floats.
inline Floats load(const float* from) { return load_raw<Floats>(from); }
inline Floats load(const bf16* from) { return widen_bf16<Floats>(widen(load_raw<Halfwords>(from))); }
inline Floats load(const f16* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(from));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(load_raw<__m128i>(from));
#else
  return widen_f16<Floats>(widen(load_raw<Halfwords>(from)));
#endif
}
inline Floats load(const e4m3* from) {
#if defined(__AVX512F__)
  // With its exponent in the place of an f16's it is 2^-8 of itself; the one NaN would be a number.
  const __m128i codes = load_raw<__m128i>(from);
  const __m256i halves =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(0xbfff - 0x10000));
  const __mmask16 number = _mm_cmpneq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  return _mm512_mask_mul_ps(splat(__builtin_nanf("")), number, _mm512_maskz_cvtph_ps(0xffff, halves), splat(256.0f));
#else
  return widen_e4m3<Floats>(widen(load_raw<Bytes>(from)));
#endif
}
inline Floats load(const e5m2* from) {  // the upper byte of an f16
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_raw<__m128i>(from)), 8));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 8));
#else
  return widen_e5m2<Floats>(widen(load_raw<Bytes>(from)));
#endif
}
inline Floats load(const i8* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, load_raw<__m128i>(from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  // Flipped, the sign bit counts 128: a number with a known exponent, less than what it has too much.
  const Words shifted = (widen(load_raw<Bytes>(from)) ^ 0x80u) | 0x4b000000u;
  return __builtin_bit_cast(Floats, shifted) - 8388736.0f;  // 2^23 + 128
#endif
}

// kWidth floats, rounded to T (see cpu/float16.h).
inline void store(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof(v)); }
inline void store(f16* to, Floats v) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  const Halfwords halves = narrow_to_halfwords(narrow_f16<Floats, Words>(v));
#endif
  __builtin_memcpy(to, &halves, sizeof(halves));
}
inline void store(bf16* to, Floats v) {
  const Halfwords halves = narrow_to_halfwords(narrow_bf16<Floats, Words>(v));
  __builtin_memcpy(to, &halves, sizeof(halves));
}
inline void store(e4m3* to, Floats v) {
  const Bytes bytes = narrow_to_bytes(narrow_e4m3<Floats, Words>(v));
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}
inline void store(e5m2* to, Floats v) {
  const Bytes bytes = narrow_to_bytes(narrow_e5m2<Floats, Words>(v));
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}
inline void store(i8* to, Floats v) {
  const Bytes bytes = narrow_to_bytes(narrow_i8<Floats, Words>(v));
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}

// The first `count` (0 ... kWidth) elements; the other lanes are zero, their memory is not touched.
template <class T>
inline Floats load(const T* from, int64_t count) {
  if (count >= kWidth) return load(from);
  T padded[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}
template <class T>
inline void store(T* to, Floats v, int64_t count) {
  if (count >= kWidth) return store(to, v);
  T padded[kWidth];
  store(padded, v);
  for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
}

// R_T(v) as floats.
template <class T>
inline Floats rounded(Floats v) {
  T stored[kWidth];
  store(stored, v);
  return load(stored);
}
template <>
inline Floats rounded<float>(Floats v) {
  return v;
}
template <>
inline Floats rounded<bf16>(Floats v) {  // without the way through memory
  return widen_bf16<Floats>(narrow_bf16<Floats, Words>(v));
}

// Over the lanes, always in the same order: upper half onto lower half, until one is left.
template <class Combine>
inline float reduce(Floats v, Combine combine) {
#if defined(__AVX512F__)
  const auto eight = combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
  const auto eight = v;
#endif
#if defined(__AVX2__)
  const auto four =
      combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  const auto four = eight;
#endif
  const auto two = combine(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return combine(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}
inline float sum(Floats v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}
inline float max(Floats v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x within 2e-7 of the truth.  Below -86.6 (results under 2^-125) it is 0, above 88.72 infinity; NaN stays NaN.
inline Floats exp(Floats x) {
  constexpr float kLow = -86.6f, kHigh = 89.0f;  // e^89 overflows of itself
  x = kHigh < x ? splat(kHigh) : x;              // in this order NaN stays
  // x = n ln 2 + r, |r| <= ln 2 / 2.
#if defined(__AVX512F__)
  const Floats n = _mm512_maskz_roundscale_ps(0xffff, x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
  constexpr float kRound = 12582912.0f;
  const Floats shifted = (kLow > x ? splat(kLow) : x) * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
#endif
  const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  // Taylor's series to r^7 / 7!; the rest is below 6e-9.
  Floats p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(kLow), _CMP_NLT_UQ), p, n);
#else
  // Times 2^n in two steps, since 2^128 is no float.
  const Words exponent = (__builtin_bit_cast(Words, shifted) - __builtin_bit_cast(uint32_t, kRound) + 126u) << 23;
  return x < kLow ? Floats{} : p * __builtin_bit_cast(Floats, exponent) * 2.0f;
#endif
}

// ln x within 2e-7 (relative, or absolute where that is more), for x that are 0, normal, infinite or NaN.
inline Floats log(Floats x) {
  constexpr uint32_t kRootOfHalf = 0x3f3504f3;
  // x = 2^n m, m from sqrt(1 / 2) to sqrt(2)
  const Words bits = __builtin_bit_cast(Words, x), power = (bits - kRootOfHalf + (128u << 23)) >> 23;  // n + 128
  const Floats m = __builtin_bit_cast(Floats, bits - ((power - 128u) << 23));
  const Floats n = __builtin_bit_cast(Floats, power | 0x4b000000u) - 8388736.0f;  // 2^23 + 128
  // ln m = 2 artanh s, by its series to s^9 / 9; the rest is below 1e-9.
  const Floats s = (m - 1.0f) / (m + 1.0f), square = s * s;
  Floats p = square * 0.222222222f + 0.285714286f;
  p = p * square + 0.4f;
  p = p * square + 0.666666667f;
  const Floats result = n * 0.693145752f + (n * 1.42860677e-6f + (s * 2.0f + p * square * s));
  const Floats finite = x == 0.0f ? splat(-__builtin_inff()) : result;
  return x < __builtin_inff() ? finite : x;  // NaN, too
}

// tanh within 3e-7 absolute: what a soft cap needs.
inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace pykv::PYKV_ISA
