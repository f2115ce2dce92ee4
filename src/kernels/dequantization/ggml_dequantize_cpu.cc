// Twin of ggml_dequantize.cu: tiles of a row, shared out among threads.  A tile is decoded to floats, whatever the output, and
// these are rounded to it.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/ggml_dequantize.h"
#include "dequantization/gguf_pieces.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kTile = 1024;        // elements: whole blocks of every format
constexpr int64_t kTilesPerTask = 16;  // fewer are not worth another thread

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

template <class T>
void dequantise(const GgmlDequantizeArgs& args, Decode decode, pykv::gguf::BlockSize size) {
  const int64_t tiles = (args.row_elements + kTile - 1) / kTile, grain = std::max<int64_t>(1, kTilesPerTask / tiles);
  const bool streamed = args.num_rows * args.row_elements * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
  parallel_for(args.num_rows * tiles, tiles == 1 ? grain : kTilesPerTask, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    alignas(64) float values[kTile];
    alignas(64) T rounded[kTile];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / tiles, first = i % tiles * kTile, n = std::min(kTile, args.row_elements - first);
      const uint8_t* blocks = static_cast<const uint8_t*>(args.blocks) + args.block_rows.offset(row);
      T* to = static_cast<T*>(args.output) + args.output_rows.offset(row) + first;
      decode(blocks + first / size.elements * size.bytes, n, values);
      if constexpr (sizeof(T) == 4) {
        out.put(to, values, n * 4);
      } else {
        for (int64_t e = 0; e < n; e += kWidth) store(rounded + e, load(values + e));
        out.put(to, rounded, n * static_cast<int64_t>(sizeof(T)));
      }
    }
  });
}

}  // namespace

void ggml_dequantize_cpu(const GgmlDequantizeArgs& args, const Launch&) {
  Decode decode = nullptr;
  gguf::dispatch_type(args.type, [&]<gguf::Type kType>() { decode = decode_blocks<kType>; });
  dispatch<float, f16, bf16>(args.dtype,
                             [&]<class T>() { dequantise<T>(args, decode, pykv::gguf::block_size(args.type)); });
}

}  // namespace pykv::PYKV_ISA
