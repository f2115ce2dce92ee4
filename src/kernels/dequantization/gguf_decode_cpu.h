// Blocks of GGUF to floats, on the CPU.
#pragma once

#include <cmath>

#include "cpu/simd.h"
#include "dequantization/gguf_pieces.h"
#include "dequantization/rounded_pairs_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

using Decode = void (*)(const uint8_t* blocks, int64_t elements, float* values);

inline void store_piece(float* values, const gguf::Piece& piece) {
#if defined(__AVX2__)
  // together in a register: a load of what was just stored in two parts would wait for both
  const __m128i codes = _mm_cvtsi64_si128(static_cast<long long>(piece.codes[0] | uint64_t{piece.codes[1]} << 32));
  const __m256 numbers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
  _mm256_storeu_ps(values, (numbers - piece.zero) * piece.scale - piece.minimum);
#else
  uint8_t codes[8];
  __builtin_memcpy(codes, piece.codes, 8);
  for (int i = 0; i < 8; ++i) values[i] = piece.scale * (codes[i] - piece.zero) - piece.minimum;
#endif
}

template <gguf::Type kType>
void decode_blocks(const uint8_t* blocks, int64_t elements, float* values) {
  constexpr pykv::gguf::BlockSize kSize = pykv::gguf::block_size(kType);
  for (; elements > 0; elements -= kSize.elements, blocks += kSize.bytes) {
    // four pieces mostly share a scale, which is then worked out once
    for (int p = 0; p < kSize.elements / 8; p += 4, values += 32)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store_piece(values + 8 * i, gguf::decode_piece<kType>(blocks, p + i));
  }
}

#if defined(__AVX512BW__)
// Formats with codes of four bits and a scale for each 32 elements: of these the sixteen values that there can be are worked out
// once, and looked up.
template <gguf::Type kType>
inline constexpr int kFourBitsBegin = kType == gguf::Type::kQ4_0 || kType == gguf::Type::kIq4Nl ? 2
                                      : kType == gguf::Type::kQ4_1                              ? 4
                                      : kType == gguf::Type::kMxfp4                             ? 1
                                      : kType == gguf::Type::kIq4Xs ? 8
                                                                    : 0;  // of other formats

// What decode_piece makes of the sixteen codes.
template <gguf::Type kType>
Floats four_bit_numbers() {
  uint32_t words[] = {0x03020100u, 0x07060504u, 0x0b0a0908u, 0x0f0e0d0cu};
  for (uint32_t& word : words) {
    if constexpr (kType == gguf::Type::kMxfp4) word = gguf::e2m1_values(word);
    if constexpr (kType == gguf::Type::kIq4Nl || kType == gguf::Type::kIq4Xs) word = gguf::iq4_values(word);
  }
  return converted(__builtin_bit_cast(Integers, widen(__builtin_bit_cast(Bytes, words))));
}

template <class T>
class SixteenValues {
 public:
  SixteenValues(Floats numbers, const gguf::Piece& piece) {
    store(values_, (numbers - piece.zero) * piece.scale - piece.minimum);
  }
  // By the lower halves of sixteen bytes.
  void put(T* to, __m128i codes) const {
    if constexpr (sizeof(T) == 4) {
      const __m512i places = _mm512_maskz_cvtepu8_epi32(0xffff, codes);  // GCC 12 warns of the form without a mask
      store(to, Floats(_mm512_maskz_permutexvar_ps(0xffff, places, load(values_))));
    } else {
      const __m256i found = _mm256_permutexvar_epi16(_mm256_cvtepu8_epi16(codes), load_raw<__m256i>(values_));
      __builtin_memcpy(to, &found, sizeof found);
    }
  }

 private:
  alignas(64) T values_[kWidth];
};

template <class T, gguf::Type kType>
void look_blocks_up(const uint8_t* blocks, int64_t elements, T* to) {
  constexpr pykv::gguf::BlockSize kSize = pykv::gguf::block_size(kType);
  const Floats numbers = four_bit_numbers<kType>();
  for (; elements > 0; elements -= kSize.elements, blocks += kSize.bytes)
    for (int group = 0; group < kSize.elements / 32; ++group, to += 32) {
      const SixteenValues<T> values(numbers, gguf::decode_piece<kType>(blocks, 4 * group));
      const __m128i codes = load_raw<__m128i>(blocks + kFourBitsBegin<kType> + 16 * group);
      values.put(to, codes);
      values.put(to + 16, _mm_srli_epi16(codes, 4));
    }
}

// Scales of the eight groups of Q4_K and Q5_K, and minimums behind them: decode_piece says how they lie.
inline Floats six_bit_scales(const uint32_t (&words)[3]) {
  const __m128i bytes = _mm_setr_epi32(static_cast<int>(words[0] & 0x3f3f3f3fu),
                                       static_cast<int>((words[2] & 0x0f0f0f0fu) | (words[0] >> 2 & 0x30303030u)),
                                       static_cast<int>(words[1] & 0x3f3f3f3fu),
                                       static_cast<int>((words[2] >> 4 & 0x0f0f0f0fu) | (words[1] >> 2 & 0x30303030u)));
  return converted(__builtin_bit_cast(Integers, widen(__builtin_bit_cast(Bytes, bytes))));
}

// Q4_K, of which bytes have codes of two groups of 32: the values of both are looked up in one register.
template <class T>
void look_q4_k_up(const uint8_t* blocks, int64_t elements, T* to) {
  constexpr int kBytes = pykv::gguf::block_size(gguf::Type::kQ4_K).bytes;
  const Floats codes = four_bit_numbers<gguf::Type::kQ4_K>();
  for (; elements > 0; elements -= 256, blocks += kBytes) {
    f16 both[2];
    uint32_t words[3];
    __builtin_memcpy(both, blocks, sizeof both);
    __builtin_memcpy(words, blocks + sizeof both, sizeof words);
    const float scale = to_float(both[0]), minimum = to_float(both[1]);
    if (!(std::fabs(scale) < INFINITY && std::fabs(minimum) < INFINITY)) {
      float values[256];
      decode_blocks<gguf::Type::kQ4_K>(blocks, 256, values);
      for (int i = 0; i < 256; i += kWidth, to += kWidth) store(to, load(values + i));
      continue;
    }
    alignas(64) float products[kWidth];
    store(products, six_bit_scales(words) * _mm512_mask_blend_ps(0xff00, splat(scale), splat(minimum)));
#pragma GCC unroll 1  // so that products are read from memory
    for (int pair = 0; pair < 4; ++pair, to += 64) {
      const Floats first = codes * products[2 * pair] - products[8 + 2 * pair],
                   second = codes * products[2 * pair + 1] - products[9 + 2 * pair];
      if constexpr (sizeof(T) == 4) {
        for (int i = 0; i < 32; i += kWidth) {
          const __m512i codes_of_both =
              _mm512_maskz_cvtepu8_epi32(0xffff, load_raw<__m128i>(blocks + 16 + 32 * pair + i));
          store(to + i, Floats(_mm512_maskz_permutexvar_ps(0xffff, codes_of_both, first)));
          store(to + 32 + i,
                Floats(_mm512_maskz_permutexvar_ps(0xffff, _mm512_maskz_srli_epi32(0xffff, codes_of_both, 4), second)));
        }
        continue;
      }
      const __m512i values = rounded_pair<T>(first, second);
      const __m512i bytes = _mm512_cvtepu8_epi16(load_raw<__m256i>(blocks + 16 + 32 * pair));
      const __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi16(15)),
                    high = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi16(16));
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(low, values));
      _mm512_storeu_si512(to + 32, _mm512_permutexvar_epi16(high, values));
    }
  }
}

// Formats whose codes are unpacked many at once: what a block holds.
struct Unpacked {
  alignas(64) int8_t codes[256];     // less `zero`
  alignas(64) float scales[kWidth];  // of 16 elements each
  alignas(64) float minimums[kWidth];
};

template <gguf::Type kType>
inline constexpr bool kUnpacked =
    kType == gguf::Type::kQ2_K || kType == gguf::Type::kQ3_K || kType == gguf::Type::kQ5_K ||
    kType == gguf::Type::kQ6_K || kType == gguf::Type::kQ5_0 || kType == gguf::Type::kQ5_1 ||
    kType == gguf::Type::kQ8_0;
template <gguf::Type kType>
inline constexpr bool kHasMinimums =
    kType == gguf::Type::kQ2_K || kType == gguf::Type::kQ5_K || kType == gguf::Type::kQ5_1;

// Formats with code books: what an index stands for, and which elements are negative, of a piece; decode_piece says how they lie.
template <gguf::Type kType>
inline constexpr bool kOfTernaryBook = kType == gguf::Type::kIq1S || kType == gguf::Type::kIq1M;
template <gguf::Type kType>
inline constexpr bool kOfBook =
    kOfTernaryBook<kType> || kType == gguf::Type::kIq2Xxs || kType == gguf::Type::kIq2Xs ||
    kType == gguf::Type::kIq2S || kType == gguf::Type::kIq3Xxs || kType == gguf::Type::kIq3S;

struct BookPiece {
  uint64_t digits;  // a byte each
  uint32_t signs;   // a bit each; of ternary ones all, where a quarter is taken off
};
template <gguf::Type kType>
BookPiece book_piece(const uint8_t* block, int p) {
  using gguf::eight_signs, gguf::kGrids, gguf::Type;
  const gguf::Bytes<1> b{block};
  const auto twos = [](uint32_t digits) { return _pdep_u64(digits, 0x0303030303030303u); };
  const auto threes = [](uint32_t first, uint32_t second) {
    return _pdep_u64(first | second << 12, 0x0707070707070707u);
  };
  if constexpr (kType == Type::kIq2Xxs) {
    const uint32_t rest = b.u32(6 + 8 * (p / 4));
    return {twos(kGrids.iq2_xxs[b.u8(2 + 8 * (p / 4) + p % 4)]), eight_signs(rest >> (7 * (p % 4)) & 127u)};
  } else if constexpr (kType == Type::kIq2Xs) {
    const uint32_t code = b.u16(2 + 2 * p);
    return {twos(kGrids.iq2_xs[code & 511u]), eight_signs(code >> 9)};
  } else if constexpr (kType == Type::kIq2S) {
    return {twos(kGrids.iq2_s[b.u8(2 + p) | (b.u8(66 + p / 4) >> (2 * (p % 4)) & 3u) << 8]), b.u8(34 + p)};
  } else if constexpr (kType == Type::kIq3Xxs) {
    const uint32_t rest = b.u32(66 + 4 * (p / 4));
    return {threes(kGrids.iq3_xxs[b.u8(2 + 2 * p)], kGrids.iq3_xxs[b.u8(3 + 2 * p)]),
            eight_signs(rest >> (7 * (p % 4)) & 127u)};
  } else if constexpr (kType == Type::kIq3S) {
    const uint32_t high = b.u8(66 + p / 4) >> (2 * (p % 4));
    return {threes(kGrids.iq3_s[b.u8(2 + 2 * p) | (high & 1u) << 8], kGrids.iq3_s[b.u8(3 + 2 * p) | (high & 2u) << 7]),
            b.u8(74 + p)};
  } else if constexpr (kType == Type::kIq1S) {
    const uint32_t rest = b.u16(34 + 2 * (p / 4));
    return {twos(kGrids.iq1[b.u8(2 + p) | (rest >> (3 * (p % 4)) & 7u) << 8]), rest >> 15 ? 255u : 0u};
  } else {
    const uint32_t nibble = b.u8(32 + p / 2) >> (4 * (p % 2));
    return {twos(kGrids.iq1[b.u8(p) | (nibble & 7u) << 8]), nibble & 8u ? 255u : 0u};
  }
}
// The scale of 16 elements, as it is stored.
template <gguf::Type kType>
int32_t book_scale(const uint8_t* block, int group) {
  using gguf::Type;
  const gguf::Bytes<1> b{block};
  uint32_t scale;
  if constexpr (kType == Type::kIq2Xxs) scale = b.u32(6 + 8 * (group / 2)) >> 28;
  if constexpr (kType == Type::kIq2Xs) scale = b.u8(66 + group / 2) >> (4 * (group % 2)) & 15u;
  if constexpr (kType == Type::kIq2S) scale = b.u8(74 + group / 2) >> (4 * (group % 2)) & 15u;
  if constexpr (kType == Type::kIq3Xxs) scale = b.u32(66 + 4 * (group / 2)) >> 28;
  if constexpr (kType == Type::kIq3S) scale = b.u8(106 + group / 4) >> (4 * (group / 2 % 2)) & 15u;
  if constexpr (kType == Type::kIq1S) scale = b.u16(34 + 2 * (group / 2)) >> 12 & 7u;
  if constexpr (kType == Type::kIq1M) scale = b.u16(48 + 2 * (group / 4)) >> (3 * (group % 4)) & 7u;
  return static_cast<int32_t>(scale);
}

// All elements of a block as signed bytes (of ternary books eighths).
template <gguf::Type kType>
void unpack_book(const uint8_t* block, int8_t* codes) {
  constexpr bool kTernary = kOfTernaryBook<kType>;
  constexpr uint64_t kTable = kTernary                       ? 0x0901f9u  // 8 * digit - 7
                              : kType == gguf::Type::kIq3Xxs ? 0x3e342c241c140c04u
                              : kType == gguf::Type::kIq3S   ? 0x0f0d0b0907050301u
                                                             : 0x2b1908u;
  alignas(64) uint64_t digits[32];
  uint8_t signs[32];
#pragma GCC unroll 8
  for (int p = 0; p < 32; ++p) {
    const BookPiece piece = book_piece<kType>(block, p);
    digits[p] = piece.digits;
    signs[p] = static_cast<uint8_t>(piece.signs);
  }
  const __m512i table = _mm512_set1_epi64(static_cast<long long>(kTable)), zero = _mm512_setzero_si512();
  for (int part = 0; part < 4; ++part) {
    const __m512i found = _mm512_shuffle_epi8(table, load_raw<__m512i>(digits + 8 * part));
    const auto negative = load_raw<uint64_t>(signs + 8 * part);
    const __m512i some = kTernary ? _mm512_mask_sub_epi8(found, negative, found, _mm512_set1_epi8(2))
                                  : _mm512_mask_sub_epi8(found, negative, zero, found);
    __builtin_memcpy(codes + 64 * part, &some, sizeof some);
  }
}

// 32 bytes twice, of the first and of the second the bits from these on, as many as the mask has.
inline __m512i bits_of_both(const uint8_t* from, int first, int second, char mask) {
  const __m512i both = _mm512_maskz_broadcast_i64x4(0xff, load_raw<__m256i>(from));
  const __m512i counts = _mm512_mask_blend_epi16(0xffff0000u, _mm512_set1_epi16(static_cast<short>(first)),
                                                 _mm512_set1_epi16(static_cast<short>(second)));
  return _mm512_and_si512(_mm512_srlv_epi16(both, counts), _mm512_set1_epi8(mask));
}

// 64 codes of a block of 256; decode_piece says how they lie.
template <gguf::Type kType>
__m512i unpacked_codes(const uint8_t* block, int part) {
  using gguf::Type;
  const int half = part / 2, odd = part % 2;
  if constexpr (kType == Type::kQ2_K) return bits_of_both(block + 16 + 32 * half, 4 * odd, 4 * odd + 2, 3);
  if constexpr (kType == Type::kQ3_K) {
    const __m512i low = bits_of_both(block + 32 + 32 * half, 4 * odd, 4 * odd + 2, 3),
                  high = bits_of_both(block, 2 * part, 2 * part + 1, 1);
    return _mm512_sub_epi8(_mm512_or_si512(low, _mm512_slli_epi16(high, 2)), _mm512_set1_epi8(4));
  }
  if constexpr (kType == Type::kQ5_K) {
    const __m512i high = bits_of_both(block + 16, 2 * part, 2 * part + 1, 1);
    return _mm512_or_si512(bits_of_both(block + 48 + 32 * part, 0, 4, 15), _mm512_slli_epi16(high, 4));
  }
  if constexpr (kType == Type::kQ6_K) {
    const __m512i nibbles = _mm512_srli_epi16(load_raw<__m512i>(block + 64 * half), static_cast<unsigned>(4 * odd)),
                  low = _mm512_and_si512(nibbles, _mm512_set1_epi8(15)),
                  high = bits_of_both(block + 128 + 32 * half, 4 * odd, 4 * odd + 2, 3);
    return _mm512_sub_epi8(_mm512_or_si512(low, _mm512_slli_epi16(high, 4)), _mm512_set1_epi8(32));
  }
}

// Whether all scales are finite; if not, what was unpacked is of no use.
template <gguf::Type kType>
bool unpack(const uint8_t* block, Unpacked& to) {
  using gguf::Type;
  constexpr int kElements = pykv::gguf::block_size(kType).elements;
  constexpr int kScale = kType == Type::kQ2_K ? 80 : kType == Type::kQ3_K ? 108 : kType == Type::kQ6_K ? 208 : 0;
  f16 given[2];
  __builtin_memcpy(given, block + kScale, kHasMinimums<kType> ? 4 : 2);
  if constexpr (kType == Type::kIq1M) {  // its four nibbles are the upper ones of the scales
    const auto words = load_raw<uint64_t>(block + 48);
    given[0] = __builtin_bit_cast(f16, static_cast<uint16_t>(_pext_u64(words, 0xf000f000f000f000u)));
  }
  const float scale = to_float(given[0]), minimum = kHasMinimums<kType> ? to_float(given[1]) : 0.0f;
  if (!(std::fabs(scale) < INFINITY && std::fabs(minimum) < INFINITY)) return false;
  if constexpr (kElements == 32) {
    __m256i codes;
    if constexpr (kType == Type::kQ8_0) {
      codes = load_raw<__m256i>(block + 2);
    } else {
      constexpr int kHigh = kType == Type::kQ5_1 ? 4 : 2;
      const __m128i nibbles = load_raw<__m128i>(block + kHigh + 4);
      const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(nibbles), _mm_srli_epi16(nibbles, 4), 1);
      codes = _mm256_or_si256(_mm256_and_si256(both, _mm256_set1_epi8(15)),
                              _mm256_maskz_set1_epi8(load_raw<uint32_t>(block + kHigh), 16));
      if (kType == Type::kQ5_0) codes = _mm256_sub_epi8(codes, _mm256_set1_epi8(16));
    }
    __builtin_memcpy(to.codes, &codes, sizeof codes);
    to.scales[0] = to.scales[1] = scale;
    to.minimums[0] = to.minimums[1] = -minimum;
  } else if constexpr (kOfBook<kType>) {
    unpack_book<kType>(block, to.codes);
    alignas(64) int32_t stored[kWidth];
#pragma GCC unroll 16
    for (int group = 0; group < kWidth; ++group) stored[group] = book_scale<kType>(block, group);
    constexpr float kFactor = kType == Type::kIq3S ? 2.0f : kType == Type::kIq3Xxs ? 0.5f : 0.25f;
    store(to.scales, (converted(load_raw<Integers>(stored)) + 0.5f) * scale * kFactor);
  } else {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i codes = unpacked_codes<kType>(block, part);
      __builtin_memcpy(to.codes + 64 * part, &codes, sizeof codes);
    }
    if constexpr (kType == Type::kQ2_K) {
      const Words bytes = widen(load_raw<Bytes>(block));
      store(to.scales, converted(__builtin_bit_cast(Integers, bytes & 15u)) * scale);
      store(to.minimums, converted(__builtin_bit_cast(Integers, bytes >> 4)) * minimum);
    } else if constexpr (kType == Type::kQ5_K) {
      uint32_t words[3];
      __builtin_memcpy(words, block + 4, sizeof words);
      const Floats six_bits = six_bit_scales(words);
      const auto of_16 = [&](int first) {
        alignas(64) int32_t lanes[kWidth];
        for (int i = 0; i < kWidth; ++i) lanes[i] = first + i / 2;
        return Floats(_mm512_maskz_permutexvar_ps(0xffff, load_raw<__m512i>(lanes), six_bits));
      };
      store(to.scales, of_16(0) * scale);
      store(to.minimums, of_16(8) * minimum);
    } else if constexpr (kType == Type::kQ6_K) {
      store(to.scales, load(reinterpret_cast<const i8*>(block + 192)) * scale);
    } else {  // Q3_K: six bits, of which the upper two lie apart
      const uint64_t low = load_raw<uint64_t>(block + 96), high = load_raw<uint32_t>(block + 104) * 0x100000001u;
      const auto eight = [&](int shift) {
        const uint64_t upper = (high >> shift & 0x03030303u) | (high >> (shift + 2) & 0x0303030300000000u);
        return static_cast<long long>((low >> shift & 0x0f0f0f0f0f0f0f0fu) | upper << 4);
      };
      const __m128i bytes = _mm_set_epi64x(eight(4), eight(0));
      const Floats six_bits = converted(__builtin_bit_cast(Integers, widen(__builtin_bit_cast(Bytes, bytes))));
      store(to.scales, (six_bits - 32.0f) * scale);
    }
  }
  return true;
}

template <class T, gguf::Type kType>
void decode_unpacked(const uint8_t* blocks, int64_t elements, T* to) {
  constexpr pykv::gguf::BlockSize kSize = pykv::gguf::block_size(kType);
  Unpacked block;
  for (; elements > 0; elements -= kSize.elements, blocks += kSize.bytes) {
    if (!unpack<kType>(blocks, block)) {
      alignas(64) float values[kSize.elements];
      decode_blocks<kType>(blocks, kSize.elements, values);
      for (int i = 0; i < kSize.elements; i += kWidth, to += kWidth) store(to, load(values + i));
      continue;
    }
    const auto sixteen = [&](int i) {
      const Floats product = load(reinterpret_cast<const i8*>(block.codes + 16 * i)) * block.scales[i];
      return kHasMinimums<kType> ? product - block.minimums[i] : product;
    };
    for (int i = 0; i < kSize.elements / 16; i += 2, to += 32) {
      const Floats first = sixteen(i), second = sixteen(i + 1);
      store_pair(to, first, second);
    }
  }
}
#endif

// Straight to T, of formats that have a quicker way; null for the others.
template <class T>
using DecodeTo = void (*)(const uint8_t* blocks, int64_t elements, T* values);
template <class T>
DecodeTo<T> quick_decoder_of([[maybe_unused]] pykv::gguf::Type type) {
  DecodeTo<T> decode = nullptr;
#if defined(__AVX512BW__)
  gguf::dispatch_type(type, [&]<gguf::Type kType>() {
    if constexpr (kFourBitsBegin<kType> != 0) decode = look_blocks_up<T, kType>;
    if constexpr (kType == gguf::Type::kQ4_K) decode = look_q4_k_up<T>;
    if constexpr (kUnpacked<kType> || kOfBook<kType>) decode = decode_unpacked<T, kType>;
  });
#endif
  return decode;
}

// `elements`: of whole blocks.
inline Decode decoder_of(pykv::gguf::Type type) {
  Decode decode = nullptr;
  gguf::dispatch_type(type, [&]<gguf::Type kType>() { decode = decode_blocks<kType>; });
  return decode;
}

}  // namespace
}  // namespace pykv::PYKV_ISA
