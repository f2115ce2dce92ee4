// 8-bit elements on the CPU: what they are unpacked to, and sums of their products.
//
// A `Codes` has: Element, what 128 codes of a or b become; Sum, a vector of partial sums; kStep, elements of a vector.
// unpack_b returns what sums have too much, of which the lanes of less() are the opposite.
#pragma once

#include "cpu/simd.h"

#if defined(__AVX512BF16__) && !defined(__clang__)
#define PYKV_MM_VNNI 1  // cpu_isa() asks for it, too; other files do without
#pragma GCC target("avx512vnni")
#endif

namespace pykv::PYKV_ISA {

// float8_e4m3fn, exact in fp32.
struct FloatCodes {
  using Element = float;
  using Sum = Floats;
  static constexpr int kStep = kWidth;
  static constexpr bool kIsInt8 = false;

  static void unpack_a(const uint8_t* codes, Element* to) {
    for (int i = 0; i < 128; i += kWidth) store(to + i, load(reinterpret_cast<const e4m3*>(codes) + i));
  }
  static int32_t unpack_b(const uint8_t* codes, Element* to) {
    unpack_a(codes, to);
    return 0;
  }
  static Sum less(int32_t) { return Sum{}; }
  static Sum add(Sum sum, const Element* a, const Element* b) { return load(a) * load(b) + sum; }
  static Floats floats(Sum sum) { return sum; }
};

#if defined(__AVX512BF16__)
// And in bf16.
struct PairCodes : FloatCodes {
  using Element = bf16;
  static constexpr int kStep = 32;

  static void unpack_a(const uint8_t* codes, Element* to) {
    const auto* const from = reinterpret_cast<const e4m3*>(codes);
    for (int i = 0; i < 128; i += kStep) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(load(from + i + 16), load(from + i));
      __builtin_memcpy(to + i, &pairs, sizeof(pairs));
    }
  }
  static int32_t unpack_b(const uint8_t* codes, Element* to) {
    unpack_a(codes, to);
    return 0;
  }
  static Sum add(Sum sum, const Element* a, const Element* b) {
    return _mm512_dpbf16_ps(sum, load_raw<__m512bh>(a), load_raw<__m512bh>(b));
  }
};
#else
using PairCodes = FloatCodes;
#endif

#if defined(PYKV_MM_VNNI)
// int8: the instruction wants a without sign, 128 more than it is.
struct Int8Codes {
  using Element = uint8_t;
  using Sum = Integers;
  static constexpr int kStep = 64;
  static constexpr bool kIsInt8 = true;

  static void unpack_a(const uint8_t* codes, Element* to) {
    for (int i = 0; i < 128; ++i) to[i] = codes[i] ^ 0x80;
  }
  static int32_t unpack_b(const uint8_t* codes, Element* to) {
    int32_t sum = 0;
    for (int i = 0; i < 128; ++i) {
      to[i] = codes[i];
      sum += static_cast<int8_t>(codes[i]);
    }
    return 128 * sum;
  }
  static Sum less(int32_t excess) { return __builtin_bit_cast(Sum, _mm512_maskz_set1_epi32(1, -excess)); }
  static Sum add(Sum sum, const Element* a, const Element* b) {
    return __builtin_bit_cast(
        Sum, _mm512_dpbusd_epi32(__builtin_bit_cast(__m512i, sum), load_raw<__m512i>(a), load_raw<__m512i>(b)));
  }
  static Floats floats(Sum sum) { return converted(sum); }
};
#else
// int8 in 16 bits: sums of two products at a time.
struct Int8Codes {
  using Element = int16_t;
  using Sum = Integers;
  static constexpr int kStep = 2 * kWidth;
  static constexpr bool kIsInt8 = true;

  static void unpack_a(const uint8_t* codes, Element* to) {
    for (int i = 0; i < 128; ++i) to[i] = static_cast<int8_t>(codes[i]);
  }
  static int32_t unpack_b(const uint8_t* codes, Element* to) {
    unpack_a(codes, to);
    return 0;
  }
  static Sum less(int32_t) { return Sum{}; }
  static Sum add(Sum sum, const Element* a, const Element* b) {
#if defined(__AVX512BW__)
    return sum + __builtin_bit_cast(Sum, _mm512_madd_epi16(load_raw<__m512i>(a), load_raw<__m512i>(b)));
#elif defined(__AVX2__)
    return sum + __builtin_bit_cast(Sum, _mm256_madd_epi16(load_raw<__m256i>(a), load_raw<__m256i>(b)));
#elif defined(__SSE2__)
    return sum + __builtin_bit_cast(Sum, _mm_madd_epi16(load_raw<__m128i>(a), load_raw<__m128i>(b)));
#else
    for (int i = 0; i < kWidth; ++i) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
#endif
  }
  static Floats floats(Sum sum) { return converted(sum); }
};
#endif

}  // namespace pykv::PYKV_ISA
