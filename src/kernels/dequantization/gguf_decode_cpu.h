// Blocks of GGUF to floats, on the CPU.
#pragma once

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
                                      : kType == gguf::Type::kIq4Xs                             ? 8
                                      : kType == gguf::Type::kQ4_K                              ? 16
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

// Scales and minimums of the eight groups of a block, at once.
inline void q4_k_scales(const uint8_t* block, float (&scales)[8], float (&minimums)[8]) {
  uint32_t first, second, third;
  __builtin_memcpy(&first, block + 4, 4);
  __builtin_memcpy(&second, block + 8, 4);
  __builtin_memcpy(&third, block + 12, 4);
  const uint32_t words[] = {first & 0x3f3f3f3fu, (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u),
                            second & 0x3f3f3f3fu, (third >> 4 & 0x0f0f0f0fu) | (second >> 2 & 0x30303030u)};
  const Floats all = converted(__builtin_bit_cast(Integers, widen(__builtin_bit_cast(Bytes, words))));
  f16 both[2];
  __builtin_memcpy(both, block, sizeof both);
  float numbers[kWidth];
  store(numbers, all);
  const float scale = to_float(both[0]), minimum = to_float(both[1]);
  for (int i = 0; i < 8; ++i) {
    scales[i] = scale * numbers[i];
    minimums[i] = minimum * numbers[8 + i];
  }
}

template <class T, gguf::Type kType>
void look_blocks_up(const uint8_t* blocks, int64_t elements, T* to) {
  constexpr pykv::gguf::BlockSize kSize = pykv::gguf::block_size(kType);
  const Floats numbers = four_bit_numbers<kType>();
  for (; elements > 0; elements -= kSize.elements, blocks += kSize.bytes) {
    float scales[8], minimums[8];
    if constexpr (kType == gguf::Type::kQ4_K) q4_k_scales(blocks, scales, minimums);
#pragma GCC unroll 8
    for (int group = 0; group < kSize.elements / 32; ++group, to += 32) {
      const SixteenValues<T> values(numbers, kType == gguf::Type::kQ4_K
                                                 ? gguf::Piece{{}, scales[group], 0, minimums[group]}
                                                 : gguf::decode_piece<kType>(blocks, 4 * group));
      const uint8_t* const codes = blocks + kFourBitsBegin<kType>;
      const auto sixteen = [&](int at, int half) {
        return _mm_srli_epi16(load_raw<__m128i>(codes + at), 4 * half);
      };
      if constexpr (kType == gguf::Type::kQ4_K) {  // 32 lower halves, then the upper ones
        for (int i = 0; i < 2; ++i) values.put(to + 16 * i, sixteen(32 * (group / 2) + 16 * i, group % 2));
      } else {
        for (int i = 0; i < 2; ++i) values.put(to + 16 * i, sixteen(16 * group, i));
      }
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
