// Twin of packed_dequantize.cu: tiles of 32 rows, the codes of which lie in whole words, and some columns.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/packed_dequantize.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kRows = 32, kColumns = 256;

struct Tile {
  int64_t row, column, rows, columns;
};

// codes[column] of one row of the tile.
void codes_of_row(const PackedDequantizeArgs& args, const Tile& tile, int64_t row, float* codes) {
  if (args.packing == Packing::kAwq4) {
    const uint32_t* words = args.codes + (tile.row + row) * args.code_stride + tile.column / 8;
    for (int64_t word = 0; word < tile.columns / 8; ++word) {
#if defined(__AVX2__)
      const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(words[word])),
                                                _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28));
      _mm256_storeu_ps(codes + 8 * word, _mm256_cvtepi32_ps(_mm256_and_si256(nibbles, _mm256_set1_epi32(15))));
#else
      for (int i = 0; i < 8; ++i)
        codes[8 * word + i] = static_cast<int>(words[word] >> (4 * (i / 2) + 16 * (i % 2)) & 15u);
#endif
    }
    return;
  }
  const int bits = bits_of(args.packing), at = static_cast<int>(row) * bits, shift = at % 32;
  const uint32_t mask = (1u << bits) - 1;
  const uint32_t* words = args.codes + (tile.row * bits / 32 + at / 32) * args.code_stride + tile.column;
  if (shift + bits <= 32) {
    for (int64_t i = 0; i < tile.columns; ++i) codes[i] = static_cast<int>(words[i] >> shift & mask);
  } else {
    const uint32_t* next = words + args.code_stride;
    for (int64_t i = 0; i < tile.columns; ++i)
      codes[i] = static_cast<int>((words[i] >> shift | next[i] << (32 - shift)) & mask);
  }
}

void zeros_of_group(const PackedDequantizeArgs& args, const Tile& tile, int64_t group, float* zeros) {
  const uint32_t* words = args.zeros + group * args.zero_stride;
  const int64_t bits = bits_of(args.packing);
  for (int64_t i = 0; i < tile.columns; ++i) {
    const int64_t column = tile.column + i;
    if (args.packing == Packing::kAwq4) {
      zeros[i] = static_cast<int>(words[column / 8] >> (4 * (column % 8 / 2) + 16 * (column % 2)) & 15u);
    } else {
      const int64_t at = column * bits, shift = at % 32;
      uint32_t code = words[at / 32] >> shift;
      if (shift + bits > 32) code |= words[at / 32 + 1] << (32 - shift);
      zeros[i] = static_cast<int>((code & ((1u << bits) - 1)) + args.zero_offset);
    }
  }
}

template <class T>
void dequantise(const PackedDequantizeArgs& args, Reporter report) {
  const int64_t across = (args.columns + kColumns - 1) / kColumns, down = (args.rows + kRows - 1) / kRows;
  parallel_for(across * down, 4, [&](int64_t begin, int64_t end) {
    alignas(64) float codes[kColumns], zeros[kColumns], scales[kColumns];
    for (int64_t i = begin; i < end; ++i) {
      Tile tile{i / across * kRows, i % across * kColumns, 0, 0};
      tile.rows = std::min(kRows, args.rows - tile.row);
      tile.columns = std::min(kColumns, args.columns - tile.column);
      int64_t known = -1;
      for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t at = tile.row + row;
        const int64_t group = args.group_of_row.data ? args.group_of_row[at] : at / args.group_size;
        if (group < 0 || group >= args.groups) {
          report(group, args.groups);
          continue;
        }
        if (group != known) {
          zeros_of_group(args, tile, group, zeros);
          const T* from = static_cast<const T*>(args.scales) + group * args.scale_stride + tile.column;
          for (int64_t c = 0; c < tile.columns; ++c) scales[c] = to_float(from[c]);
          known = group;
        }
        codes_of_row(args, tile, row, codes);
        T* to = static_cast<T*>(args.output) + at * args.output_stride + tile.column;
        int64_t c = 0;
        for (; c + kWidth <= tile.columns; c += kWidth)
          store(to + c, (load(codes + c) - load(zeros + c)) * load(scales + c));
        for (; c < tile.columns; ++c) to[c] = from_float<T>((codes[c] - zeros[c]) * scales[c]);
      }
    }
  });
}

}  // namespace

void packed_dequantize_cpu(const PackedDequantizeArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.dtype,
                             [&]<class T>() { dequantise<T>(args, launch.reporter("gptq_dequantize: g_idx")); });
}

}  // namespace pykv::PYKV_ISA
