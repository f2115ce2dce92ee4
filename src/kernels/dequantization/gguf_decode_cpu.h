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

// `elements`: of whole blocks.
inline Decode decoder_of(pykv::gguf::Type type) {
  Decode decode = nullptr;
  gguf::dispatch_type(type, [&]<gguf::Type kType>() { decode = decode_blocks<kType>; });
  return decode;
}

}  // namespace
}  // namespace pykv::PYKV_ISA
