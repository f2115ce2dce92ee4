// 8-bit codes on the CPU: what they are unpacked to, and how that is multiplied (gemm/row_products_cpu.h).
#pragma once

#include "cpu/code_table.h"
#include "gemm/row_products_cpu.h"

namespace pykv::PYKV_ISA {

// float8_e4m3fn, exact in bf16 and fp32.
template <class Way_>
struct E4M3Codes {
  using Way = Way_;
  using Element = typename Way::Element;
  static constexpr bool kIsInt8 = false;

  void unpack_a(const uint8_t* codes, Element* to, int64_t stride) const {
    if constexpr (__is_same(Element, float)) {
      for (int i = 0; i < kBlock; i += 4 * kWidth) {
        Floats some[4];
        floats_(reinterpret_cast<const e4m3*>(codes) + i, some);
        for (const Floats& v : some) store(to, v), to += stride;
      }
    } else {
#if defined(__AVX512BF16__)
      for (int i = 0; i < kBlock; i += 64, to += 2 * stride) {
        __m512i pairs[2];
        table_.in_order(load_raw<__m512i>(codes + i), pairs);
        __builtin_memcpy(to, &pairs[0], sizeof(pairs[0]));
        __builtin_memcpy(to + stride, &pairs[1], sizeof(pairs[1]));
      }
#endif
    }
  }
  Floats unpack_b(const uint8_t* codes, Element* to, int64_t stride) const {
    unpack_a(codes, to, stride);
    return Floats{};
  }

 private:
  const FloatLoader<e4m3> floats_ = {};
#if defined(__AVX512BF16__)
  const CodeTable table_ = bf16_table<e4m3>();
#endif
};

#if defined(__AVX512VNNI__)
// The instruction wants one operand without sign: a is, 128 more than it was.
struct Int8Codes {
  struct Way {
    using Element = uint8_t;
    using Vector = __m512i;
    using Sum = Integers;
    static constexpr int kStep = 64;
    static constexpr bool kExcess = true;
    static Sum add(Sum sum, Vector a, Vector b) {
      return __builtin_bit_cast(Sum, _mm512_dpbusd_epi32(__builtin_bit_cast(__m512i, sum), a, b));
    }
  };
  using Element = Way::Element;
  static constexpr bool kIsInt8 = true;

  void unpack_a(const uint8_t* codes, Element* to, int64_t stride) const {
    for (int i = 0; i < kBlock; i += Way::kStep, to += stride)
      for (int j = 0; j < Way::kStep; ++j) to[j] = codes[i + j] ^ 0x80;
  }
  Integers unpack_b(const uint8_t* codes, Element* to, int64_t stride) const {
    Integers excess = {};
    for (int i = 0; i < kBlock; i += Way::kStep, to += stride) {
      const auto some = load_raw<__m512i>(codes + i);
      __builtin_memcpy(to, &some, sizeof(some));
      excess = Way::add(excess, _mm512_set1_epi8(-128), some);
    }
    return excess;
  }
};
#else
// As 16 bits: sums of two products at a time.
struct Int8Codes {
  struct Way {
    using Element = int16_t;
#if defined(__AVX512BW__)
    using Vector = __m512i;
#elif defined(__AVX2__)
    using Vector = __m256i;
#elif defined(__SSE2__)
    using Vector = __m128i;
#else
    using Vector = int16_t __attribute__((vector_size(16)));
#endif
    using Sum = Integers;
    static constexpr int kStep = 2 * kWidth;
    static constexpr bool kExcess = false;
    static Sum add(Sum sum, Vector a, Vector b) {
#if defined(__AVX512BW__)
      return sum + __builtin_bit_cast(Sum, _mm512_madd_epi16(a, b));
#elif defined(__AVX2__)
      return sum + __builtin_bit_cast(Sum, _mm256_madd_epi16(a, b));
#elif defined(__SSE2__)
      return sum + __builtin_bit_cast(Sum, _mm_madd_epi16(a, b));
#else
      for (int i = 0; i < kWidth; ++i) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
      return sum;
#endif
    }
  };
  using Element = Way::Element;
  static constexpr bool kIsInt8 = true;

  void unpack_a(const uint8_t* codes, Element* to, int64_t stride) const {
    for (int i = 0; i < kBlock; i += Way::kStep, to += stride)
      for (int j = 0; j < Way::kStep; ++j) to[j] = static_cast<int8_t>(codes[i + j]);
  }
  Integers unpack_b(const uint8_t* codes, Element* to, int64_t stride) const {
    unpack_a(codes, to, stride);
    return Integers{};
  }
};
#endif

}  // namespace pykv::PYKV_ISA
