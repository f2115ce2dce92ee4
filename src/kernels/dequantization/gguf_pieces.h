// The decoders of GGUF's block formats, for host and device: one function a format, which unpacks a piece, eight neighbours of a
// block.
//
// Whatever the format, an element is scale * (code - zero) - minimum, with a code below 256.  The product is exact in fp32, so
// that there is one rounding at most, of the difference, and it does not matter whether the compiler contracts both into one
// instruction.  Codes of signed tables are stored with an offset, which `zero` takes off again.
//
// Codes are made four at once, in the bytes of a word.
#pragma once

#include <cstdint>

#include "dequantization/gguf_grids.h"
#include "dequantization/gguf_types.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define PYKV_GGUF __device__ __forceinline__
#else
#include "cpu/float16.h"
#define PYKV_GGUF inline __attribute__((always_inline))
#endif

#if defined(__CUDACC__)
namespace pykv::gguf {
#else
namespace pykv::PYKV_ISA::gguf {
using namespace pykv::gguf;
#endif

struct Piece {
  uint32_t codes[2];  // of elements 0 ... 3 and 4 ... 7, the first in the lowest byte
  float scale;
  float zero = 0;
  float minimum = 0;
};

#if defined(__CUDACC__)
__device__ const Grids kGrids = make_grids();

PYKV_GGUF float half_value(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); }
PYKV_GGUF float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
// A float of 2^23 and more has its lowest digits in its lowest bits; there is no quicker conversion of a byte.
PYKV_GGUF float byte_value(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388608.0f;
}
#else
static constexpr const Grids& kGrids = kHostGrids;

PYKV_GGUF float half_value(uint32_t bits) { return to_float(f16{static_cast<uint16_t>(bits)}); }
PYKV_GGUF float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
#endif

// The bytes of a block, of which the first lies at a multiple of kAlign.
template <int kAlign>
struct Bytes {
  const uint8_t* data;

  PYKV_GGUF uint32_t u8(int at) const { return data[at]; }
  PYKV_GGUF uint32_t u16(int at) const { return load<uint16_t>(at); }  // `at` is even
  PYKV_GGUF uint32_t u32(int at) const {                               // a multiple of 4, or of 2 where kAlign is 2
#if defined(__CUDACC__)
    if constexpr (kAlign < 4) return u16(at) | u16(at + 2) << 16;
#endif
    return load<uint32_t>(at);
  }
  PYKV_GGUF float half(int at) const { return half_value(u16(at)); }

 private:
  template <class U>
  PYKV_GGUF U load(int at) const {
#if defined(__CUDACC__)
    if constexpr (kAlign >= static_cast<int>(sizeof(U))) return *reinterpret_cast<const U*>(data + at);
    U value = 0;
    for (int i = 0; i < static_cast<int>(sizeof(U)); ++i) value |= static_cast<U>(data[at + i]) << (8 * i);
    return value;
#else
    U value;
    __builtin_memcpy(&value, data + at, sizeof value);
    return value;
#endif
  }
};

// Four bits to the lowest ones of four bytes; so four digits of two, and of three bits.
PYKV_GGUF uint32_t spread_bits(uint32_t bits) { return (bits & 15u) * 0x204081u & 0x01010101u; }
PYKV_GGUF uint32_t spread_pairs(uint32_t digits) {
  const uint32_t halves = ((digits & 0xffu) | (digits & 0xffu) << 12) & 0x000f000fu;
  return (halves | halves << 6) & 0x03030303u;
}
PYKV_GGUF uint32_t spread_triples(uint32_t digits) {
  const uint32_t halves = (digits | digits << 10) & 0x003f003fu;
  return (halves | halves << 5) & 0x07070707u;
}

// bias + m, or bias - m where the bit is set, in each byte: m are magnitudes of at most `bias`.
PYKV_GGUF uint32_t with_signs(uint32_t m, uint32_t bits, uint32_t bias) {
  return bias * 0x01010101u + m - 2 * (m & spread_bits(bits) * 255u);
}

// The eighth sign of seven makes the number of minus signs even.
PYKV_GGUF uint32_t eight_signs(uint32_t seven) {
  uint32_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return seven | (parity & 1u) << 7;
}

// Entries of a table of 16 bytes, which four words hold, for four codes.
PYKV_GGUF uint32_t look_up(uint32_t codes, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) {
#if defined(__CUDACC__)
  // the selector has a code in each of four nibbles; bit 3 of a nibble would spread a sign
  const uint32_t packed = (codes & 0x000f000fu) | (codes & 0x0f000f00u) >> 4;
  const uint32_t selector = (packed & 0xffu) | packed >> 8;
  const uint32_t low = __byte_perm(t0, t1, selector & 0x7777u), high = __byte_perm(t2, t3, selector & 0x7777u);
  const uint32_t is_high = (codes >> 3 & 0x01010101u) * 255u;
  return (low & ~is_high) | (high & is_high);
#elif defined(__SSSE3__)
  const __m128i table =
      _mm_setr_epi32(static_cast<int>(t0), static_cast<int>(t1), static_cast<int>(t2), static_cast<int>(t3));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_shuffle_epi8(table, _mm_cvtsi32_si128(static_cast<int>(codes)))));
#else
  const uint32_t table[] = {t0, t1, t2, t3};
  const uint8_t* entries = reinterpret_cast<const uint8_t*>(table);
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t{entries[codes >> (8 * i) & 15u]} << (8 * i);
  return found;
#endif
}

// IQ4: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113; 127 more.
PYKV_GGUF uint32_t iq4_values(uint32_t codes) {
  return look_up(codes, 0x3e2c1700u, 0x75695c4eu, 0xa5988c80u, 0xf0d8c4b4u);
}
// Twice e2m1: 0 1 2 3, 4 6 8 12, and minus these; 12 more.
PYKV_GGUF uint32_t e2m1_values(uint32_t codes) {
  return look_up(codes, 0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u);
}

// 8, 25 or 43 for the digits 0, 1, 2.
PYKV_GGUF uint32_t iq2_values(uint32_t digits) {
  const uint32_t d = spread_pairs(digits);
  return 0x08080808u + 17 * d + (d >> 1 & 0x01010101u);
}
// 4, 12, 20 ... 52 and 62.
PYKV_GGUF uint32_t iq3_xxs_values(uint32_t digits) {
  const uint32_t d = spread_triples(digits);
  return 0x04040404u + 8 * d + 2 * (d & d >> 1 & d >> 2 & 0x01010101u);
}

// Eight nibbles of neighbouring bytes: the low ones, or the high ones.
template <class Block>
PYKV_GGUF Piece nibbles(const Block& b, int at, int is_high) {
  const int shift = 4 * is_high;
  return {{b.u32(at) >> shift & 0x0f0f0f0fu, b.u32(at + 4) >> shift & 0x0f0f0f0fu}, 0};
}
// Digits of two bits of neighbouring bytes.
template <class Block>
PYKV_GGUF Piece pairs(const Block& b, int at, int which) {
  return {{b.u32(at) >> (2 * which) & 0x03030303u, b.u32(at + 4) >> (2 * which) & 0x03030303u}, 0};
}

template <Type kType>
inline constexpr int kBlockAlign = block_size(kType).bytes % 4 == 0   ? 4
                                   : block_size(kType).bytes % 2 == 0 ? 2
                                                                      : 1;

// Elements 8 p ... 8 p + 7 of a block.
template <Type kType>
PYKV_GGUF Piece decode_piece(const uint8_t* block, int p) {
  const Bytes<kBlockAlign<kType>> b{block};
  Piece y{};
  if constexpr (kType == Type::kQ4_0 || kType == Type::kQ4_1 || kType == Type::kIq4Nl) {
    constexpr int kCodes = kType == Type::kQ4_1 ? 4 : 2;
    y = nibbles(b, kCodes + 8 * (p & 1), p >> 1);
    y.scale = b.half(0);
    if constexpr (kType == Type::kQ4_0) y.zero = 8;
    if constexpr (kType == Type::kQ4_1) y.minimum = -b.half(2);
    if constexpr (kType == Type::kIq4Nl) {
      for (uint32_t& codes : y.codes) codes = iq4_values(codes);
      y.zero = 127;
    }
  } else if constexpr (kType == Type::kQ5_0 || kType == Type::kQ5_1) {
    constexpr int kHigh = kType == Type::kQ5_1 ? 4 : 2;
    y = nibbles(b, kHigh + 4 + 8 * (p & 1), p >> 1);
    const uint32_t high = b.u32(kHigh) >> (8 * p);
    y.codes[0] |= spread_bits(high) << 4;
    y.codes[1] |= spread_bits(high >> 4) << 4;
    y.scale = b.half(0);
    if constexpr (kType == Type::kQ5_0) y.zero = 16;
    if constexpr (kType == Type::kQ5_1) y.minimum = -b.half(2);
  } else if constexpr (kType == Type::kQ8_0 || kType == Type::kQ8_1 || kType == Type::kQ8_K) {
    constexpr int kCodes = kType == Type::kQ8_0 ? 2 : 4;
    y.codes[0] = b.u32(kCodes + 8 * p) ^ 0x80808080u;
    y.codes[1] = b.u32(kCodes + 8 * p + 4) ^ 0x80808080u;
    y.scale = kType == Type::kQ8_K ? float_of_bits(b.u32(0)) : b.half(0);
    y.zero = 128;
  } else if constexpr (kType == Type::kQ1_0) {
    y.codes[0] = spread_bits(b.u8(2 + p)) << 1;
    y.codes[1] = spread_bits(b.u8(2 + p) >> 4) << 1;
    y.scale = b.half(0);
    y.zero = 1;
  } else if constexpr (kType == Type::kQ2_K) {
    y = pairs(b, 16 + 32 * (p >> 4) + 8 * (p & 3), p >> 2 & 3);
    const uint32_t scales = b.u8(p >> 1);
    y.scale = b.half(80) * static_cast<float>(scales & 15u);
    y.minimum = b.half(82) * static_cast<float>(scales >> 4);
  } else if constexpr (kType == Type::kQ3_K) {
    y = pairs(b, 32 + 32 * (p >> 4) + 8 * (p & 3), p >> 2 & 3);
    const int plane = p >> 2, group = p >> 1;
    y.codes[0] |= (b.u32(8 * (p & 3)) >> plane & 0x01010101u) << 2;
    y.codes[1] |= (b.u32(8 * (p & 3) + 4) >> plane & 0x01010101u) << 2;
    const uint32_t low = b.u8(96 + (group & 7)) >> (4 * (group >> 3)) & 15u;
    const uint32_t high = b.u8(104 + (group & 3)) >> (2 * (group >> 2)) & 3u;
    y.scale = b.half(108) * (static_cast<float>(low | high << 4) - 32.0f);
    y.zero = 4;
  } else if constexpr (kType == Type::kQ4_K || kType == Type::kQ5_K) {
    constexpr int kCodes = kType == Type::kQ4_K ? 16 : 48;
    y = nibbles(b, kCodes + 32 * (p >> 3) + 8 * (p & 3), p >> 2 & 1);
    const int group = p >> 2, shift = 8 * (group & 3);
    if constexpr (kType == Type::kQ5_K) {
      y.codes[0] |= (b.u32(16 + 8 * (p & 3)) >> group & 0x01010101u) << 4;
      y.codes[1] |= (b.u32(20 + 8 * (p & 3)) >> group & 0x01010101u) << 4;
    }
    // six bits each of eight scales and minimums: whole in the first two words, or the upper two bits there and four in the third
    const uint32_t first = b.u32(4) >> shift, second = b.u32(8) >> shift, third = b.u32(12) >> shift;
    const bool whole = group < 4;
    const uint32_t scale = whole ? first & 63u : (third & 15u) | (first >> 2 & 48u);
    const uint32_t minimum = whole ? second & 63u : (third >> 4 & 15u) | (second >> 2 & 48u);
    y.scale = b.half(0) * static_cast<float>(scale);
    y.minimum = b.half(2) * static_cast<float>(minimum);
  } else if constexpr (kType == Type::kQ6_K) {
    y = nibbles(b, 64 * (p >> 4) + 8 * (p & 7), p >> 3 & 1);
    const Piece high = pairs(b, 128 + 32 * (p >> 4) + 8 * (p & 3), p >> 2 & 3);
    y.codes[0] |= high.codes[0] << 4;
    y.codes[1] |= high.codes[1] << 4;
    y.scale = b.half(208) * static_cast<float>(static_cast<int8_t>(b.u8(192 + (p >> 1))));
    y.zero = 32;
  } else if constexpr (kType == Type::kTq2_0) {
    y = pairs(b, 32 * (p >> 4) + 8 * (p & 3), p >> 2 & 3);
    y.scale = b.half(64);
    y.zero = 1;
  } else if constexpr (kType == Type::kTq1_0) {
    // a byte is a fraction of five digits of base 3; times 3 to the n, its next digit is what is above the point, times 3
    for (int half = 0; half < 2; ++half) {
      int at = 8 * (p & 3) + 4 * half, digit = p >> 2;                       // bytes 0 ... 31 have five planes of 32
      if (p >= 20) at = 32 + 8 * (p & 1) + 4 * half, digit = (p - 20) >> 1;  // bytes 32 ... 47 have five of 16
      if (p >= 30) at = 48, digit = 2 * (p - 30) + half;                     // bytes 48 ... 51 have four of 4
      uint32_t power = digit & 1 ? 3 : 1;
      power *= digit & 2 ? 9 : 1;
      power *= digit & 4 ? 81 : 1;
      const uint32_t bytes = b.u32(at);
      const uint32_t even = (bytes & 0x00ff00ffu) * power & 0x00ff00ffu;
      const uint32_t odd = (bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
      y.codes[half] = (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
    }
    y.scale = b.half(52);
    y.zero = 1;
  } else if constexpr (kType == Type::kMxfp4) {
    y = nibbles(b, 1 + 8 * (p & 1), p >> 1);
    for (uint32_t& codes : y.codes) codes = e2m1_values(codes);
    const uint32_t exponent = b.u8(0);  // half of it, since the values are twice e2m1; below 2 a subnormal
    y.scale = float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    y.zero = 12;
  } else if constexpr (kType == Type::kNvfp4) {
    y = nibbles(b, 4 + 8 * (p >> 1), p & 1);
    for (uint32_t& codes : y.codes) codes = e2m1_values(codes);
    const uint32_t e4m3 = b.u8(p >> 1), exponent = e4m3 >> 3 & 15u, mantissa = e4m3 & 7u;
    const float subnormal = static_cast<float>(mantissa) * 0x1p-10f;  // half of it, since the values are twice e2m1
    y.scale = exponent == 0 ? subnormal : float_of_bits((exponent + 119u) << 23 | mantissa << 20);
    if (e4m3 == 0x7f) y.scale = 0;
    y.zero = 12;
  } else if constexpr (kType == Type::kIq4Xs) {
    y = nibbles(b, 8 + 16 * (p >> 2) + 8 * (p & 1), p >> 1 & 1);
    for (uint32_t& codes : y.codes) codes = iq4_values(codes);
    const int group = p >> 2;
    const uint32_t low = b.u8(4 + (group >> 1)) >> (4 * (group & 1)) & 15u, high = b.u16(2) >> (2 * group) & 3u;
    y.scale = b.half(0) * (static_cast<float>(low | high << 4) - 32.0f);
    y.zero = 127;
  } else if constexpr (kType == Type::kIq2Xxs || kType == Type::kIq2Xs || kType == Type::kIq2S) {
    uint32_t digits, signs, scale;
    if constexpr (kType == Type::kIq2Xxs) {
      const uint32_t rest = b.u32(6 + 8 * (p >> 2));
      digits = kGrids.iq2_xxs[b.u8(2 + 8 * (p >> 2) + (p & 3))];
      signs = eight_signs(rest >> (7 * (p & 3)) & 127u);
      scale = rest >> 28;
    } else if constexpr (kType == Type::kIq2Xs) {
      const uint32_t code = b.u16(2 + 2 * p);
      digits = kGrids.iq2_xs[code & 511u];
      signs = eight_signs(code >> 9);
      scale = b.u8(66 + (p >> 2)) >> (4 * (p >> 1 & 1)) & 15u;
    } else {
      digits = kGrids.iq2_s[b.u8(2 + p) | (b.u8(66 + (p >> 2)) >> (2 * (p & 3)) & 3u) << 8];
      signs = b.u8(34 + p);
      scale = b.u8(74 + (p >> 2)) >> (4 * (p >> 1 & 1)) & 15u;
    }
    y.codes[0] = with_signs(iq2_values(digits), signs, 43);
    y.codes[1] = with_signs(iq2_values(digits >> 8), signs >> 4, 43);
    y.scale = b.half(0) * (0.5f + static_cast<float>(scale)) * 0.25f;
    y.zero = 43;
  } else if constexpr (kType == Type::kIq3Xxs) {
    const uint32_t rest = b.u32(66 + 4 * (p >> 2)), signs = eight_signs(rest >> (7 * (p & 3)) & 127u);
    y.codes[0] = with_signs(iq3_xxs_values(kGrids.iq3_xxs[b.u8(2 + 2 * p)]), signs, 62);
    y.codes[1] = with_signs(iq3_xxs_values(kGrids.iq3_xxs[b.u8(3 + 2 * p)]), signs >> 4, 62);
    y.scale = b.half(0) * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
    y.zero = 62;
  } else if constexpr (kType == Type::kIq3S) {
    const uint32_t high = b.u8(66 + (p >> 2)) >> (2 * (p & 3)), signs = b.u8(74 + p);
    const uint32_t first = b.u8(2 + 2 * p) | (high & 1u) << 8, second = b.u8(3 + 2 * p) | (high & 2u) << 7;
    y.codes[0] = with_signs(0x01010101u + 2 * spread_triples(kGrids.iq3_s[first]), signs, 15);
    y.codes[1] = with_signs(0x01010101u + 2 * spread_triples(kGrids.iq3_s[second]), signs >> 4, 15);
    const uint32_t scale = b.u8(106 + (p >> 3)) >> (4 * (p >> 2 & 1)) & 15u;
    y.scale = b.half(0) * static_cast<float>(1 + 2 * scale);
    y.zero = 15;
  } else {
    static_assert(kType == Type::kIq1S || kType == Type::kIq1M);
    uint32_t high, scale, is_less;
    if constexpr (kType == Type::kIq1S) {
      const uint32_t rest = b.u16(34 + 2 * (p >> 2));
      high = rest >> (3 * (p & 3)) & 7u;
      scale = rest >> 12 & 7u;
      is_less = rest >> 15;
    } else {
      const uint32_t nibble = b.u8(32 + (p >> 1)) >> (4 * (p & 1));
      high = nibble & 7u;
      scale = b.u16(48 + 2 * (p >> 3)) >> (3 * (p >> 1 & 3)) & 7u;
      is_less = nibble >> 3 & 1u;
    }
    const uint32_t digits = kGrids.iq1[b.u8(p + (kType == Type::kIq1S ? 2 : 0)) | high << 8];
    y.codes[0] = spread_pairs(digits);
    y.codes[1] = spread_pairs(digits >> 8);
    float d;
    if constexpr (kType == Type::kIq1S) {
      d = b.half(0);
    } else {  // its four nibbles are the upper ones of the scales
      d = half_value(b.u16(48) >> 12 | (b.u16(50) >> 8 & 0x00f0u) | (b.u16(52) >> 4 & 0x0f00u) | (b.u16(54) & 0xf000u));
    }
    y.scale = d * static_cast<float>(2 * scale + 1);
    y.zero = is_less ? 1.125f : 0.875f;
  }
  return y;
}

// Calls body.operator()<type>() for a type that is known at run time.
template <class Body>
PYKV_GGUF void dispatch_type(Type type, Body&& body) {
  switch (type) {
#define PYKV_GGUF_CASE(name) \
  case Type::name:           \
    return body.template operator()<Type::name>();
    PYKV_GGUF_CASE(kQ4_0)
    PYKV_GGUF_CASE(kQ4_1)
    PYKV_GGUF_CASE(kQ5_0)
    PYKV_GGUF_CASE(kQ5_1)
    PYKV_GGUF_CASE(kQ8_0)
    PYKV_GGUF_CASE(kQ8_1)
    PYKV_GGUF_CASE(kQ2_K)
    PYKV_GGUF_CASE(kQ3_K)
    PYKV_GGUF_CASE(kQ4_K)
    PYKV_GGUF_CASE(kQ5_K)
    PYKV_GGUF_CASE(kQ6_K)
    PYKV_GGUF_CASE(kQ8_K)
    PYKV_GGUF_CASE(kIq2Xxs)
    PYKV_GGUF_CASE(kIq2Xs)
    PYKV_GGUF_CASE(kIq3Xxs)
    PYKV_GGUF_CASE(kIq1S)
    PYKV_GGUF_CASE(kIq4Nl)
    PYKV_GGUF_CASE(kIq3S)
    PYKV_GGUF_CASE(kIq2S)
    PYKV_GGUF_CASE(kIq4Xs)
    PYKV_GGUF_CASE(kIq1M)
    PYKV_GGUF_CASE(kTq1_0)
    PYKV_GGUF_CASE(kTq2_0)
    PYKV_GGUF_CASE(kMxfp4)
    PYKV_GGUF_CASE(kNvfp4)
    PYKV_GGUF_CASE(kQ1_0)
#undef PYKV_GGUF_CASE
  }
}

#if defined(__CUDACC__)
}  // namespace pykv::gguf
#else
}  // namespace pykv::PYKV_ISA::gguf
#endif
