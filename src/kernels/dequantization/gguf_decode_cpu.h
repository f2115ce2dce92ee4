// Blocks of GGUF to floats, on the CPU.
#pragma once

#include <cmath>

#include "cpu/simd.h"
#include "dequantization/gguf_pieces.h"

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

// High halves of 32 floats, rounded to nearest even; of finite ones.
inline __m512i rounded_to_bf16(Floats a, Floats b) {
  const auto rounded = [](Floats v) {
    const Words bits = __builtin_bit_cast(Words, v);
    return __builtin_bit_cast(__m512i, bits + (bits >> 16 & 1u) + 0x7fffu);
  };
  alignas(64) static constexpr uint16_t kHigh[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                   33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(rounded(a), load_raw<__m512i>(kHigh), rounded(b));
}
inline __m512i rounded_to_f16(Floats a, Floats b) {
  const auto rounded = [](Floats v) {
    return _mm512_maskz_broadcast_i64x4(
        0xff, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  };
  return _mm512_mask_blend_epi64(0xf0, rounded(a), rounded(b));
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
    // Scales of eight groups, and minimums: decode_piece says how they lie.
    const __m128i six_bits =
        _mm_setr_epi32(static_cast<int>(words[0] & 0x3f3f3f3fu),
                       static_cast<int>((words[2] & 0x0f0f0f0fu) | (words[0] >> 2 & 0x30303030u)),
                       static_cast<int>(words[1] & 0x3f3f3f3fu),
                       static_cast<int>((words[2] >> 4 & 0x0f0f0f0fu) | (words[1] >> 2 & 0x30303030u)));
    const Floats factors = _mm512_mask_blend_ps(0xff00, splat(scale), splat(minimum));
    alignas(64) float products[kWidth];
    store(products, converted(__builtin_bit_cast(Integers, widen(__builtin_bit_cast(Bytes, six_bits)))) * factors);
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
      __m512i values;
      if constexpr (std::is_same_v<T, bf16>) {
        values = rounded_to_bf16(first, second);
      } else {
        values = rounded_to_f16(first, second);
      }
      const __m512i bytes = _mm512_cvtepu8_epi16(load_raw<__m256i>(blocks + 16 + 32 * pair));
      const __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi16(15)),
                    high = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi16(16));
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(low, values));
      _mm512_storeu_si512(to + 32, _mm512_permutexvar_epi16(high, values));
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
