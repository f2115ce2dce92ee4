// Twin of packed_dequantize.cu: tiles of 32 rows, the codes of which lie in whole words, and some columns.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/packed_dequantize.h"
#include "dequantization/rounded_pairs_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kRows = 32, kColumns = 1024;

struct Tile {
  int64_t row, column, rows, columns;
};

inline Floats to_floats(Words codes) { return converted(__builtin_bit_cast(Integers, codes)); }

// Words of eight codes, AWQ's or such as follow one another, to floats.
template <bool kAwq>
struct Nibbles {
  static float at(const uint32_t* words, int64_t i) {
    const int64_t k = i % 8;
    return static_cast<float>(words[i / 8] >> (kAwq ? 4 * (k / 2) + 16 * (k % 2) : 4 * k) & 15u);
  }
  // From a column on that is a multiple of kWidth.
  static Floats load(const uint32_t* words, int64_t i) {
    Words lanes{};
#if defined(__AVX512F__)
    const __m512i two = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(words + i / 8)));
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    lanes = __builtin_bit_cast(Words, _mm512_maskz_permutexvar_epi32(0xffff, places, two));
#else
    lanes += words[i / 8];
#endif
    Words shifts;
    for (int k = 0; k < kWidth; ++k) {
      const int n = static_cast<int>((kWidth < 8 ? i : 0) + k) % 8;
      shifts[k] = kAwq ? 4 * (n / 2) + 16 * (n % 2) : 4 * n;
    }
    return to_floats(lanes >> shifts & 15u);
  }
};

// One row of a tile of AWQ's codes.
class AwqRow {
 public:
  AwqRow(const PackedDequantizeArgs& args, const Tile& tile, int64_t row)
      : words_(args.codes + (tile.row + row) * args.code_stride + tile.column / 8) {}
  Floats load(int64_t i) const { return Nibbles<true>::load(words_, i); }
  float at(int64_t i) const { return Nibbles<true>::at(words_, i); }

 private:
  const uint32_t* words_;
};

// The same of GPTQ's: the words of a row of codes, and those behind, if codes end there.
template <bool kSplit>
class GptqRow {
 public:
  GptqRow(const PackedDequantizeArgs& args, const uint32_t* words, int shift)
      : words_(words), next_(words + args.code_stride), shift_(shift), mask_((1u << bits_of(args.packing)) - 1) {}
  Floats load(int64_t i) const {
    Words codes = load_raw<Words>(words_ + i) >> static_cast<uint32_t>(shift_);
    if (kSplit) codes |= load_raw<Words>(next_ + i) << static_cast<uint32_t>(32 - shift_);
    return to_floats(codes & mask_);
  }
  float at(int64_t i) const {
    return static_cast<float>((words_[i] >> shift_ | (kSplit ? next_[i] << (32 - shift_) : 0u)) & mask_);
  }

 private:
  const uint32_t *words_, *next_;
  int shift_;
  uint32_t mask_;
};

void zeros_of_group(const PackedDequantizeArgs& args, const Tile& tile, int64_t group, float* zeros) {
  const uint32_t* words = args.zeros + group * args.zero_stride;
  const int64_t bits = bits_of(args.packing);
  const auto offset = static_cast<float>(args.zero_offset);
  int64_t i = 0;
  if (args.packing == Packing::kAwq4) {
    for (words += tile.column / 8; i + kWidth <= tile.columns; i += kWidth)
      store(zeros + i, Nibbles<true>::load(words, i));
    for (; i < tile.columns; ++i) zeros[i] = Nibbles<true>::at(words, i);
  } else if (bits == 4) {
    for (words += tile.column / 8; i + kWidth <= tile.columns; i += kWidth)
      store(zeros + i, Nibbles<false>::load(words, i) + offset);
    for (; i < tile.columns; ++i) zeros[i] = Nibbles<false>::at(words, i) + offset;
  } else {
    for (; i < tile.columns; ++i) {
      const int64_t at = (tile.column + i) * bits, shift = at % 32;
      uint32_t code = words[at / 32] >> shift;
      if (shift + bits > 32) code |= words[at / 32 + 1] << (32 - shift);
      zeros[i] = static_cast<float>(code & ((1u << bits) - 1)) + offset;
    }
  }
}

template <class T, class Row>
void decode_row(T* to, const Row& row, const float* zeros, const float* scales, int64_t columns) {
  const auto values = [&](int64_t c) { return (row.load(c) - load(zeros + c)) * load(scales + c); };
  int64_t c = 0;
  for (; c + 2 * kWidth <= columns; c += 2 * kWidth) store_pair(to + c, values(c), values(c + kWidth));
  for (; c + kWidth <= columns; c += kWidth) store(to + c, values(c));
  for (; c < columns; ++c) to[c] = from_float<T>((row.at(c) - zeros[c]) * scales[c]);
}

template <class T>
void dequantise(const PackedDequantizeArgs& args, Reporter report) {
  const int64_t across = (args.columns + kColumns - 1) / kColumns, down = (args.rows + kRows - 1) / kRows;
  const bool streamed = args.rows * args.columns * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
  parallel_for(across * down, 1, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    alignas(64) float zeros[kColumns], scales[kColumns];
    alignas(64) T rounded[kColumns];
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
          int64_t c = 0;
          for (; c + kWidth <= tile.columns; c += kWidth) store(scales + c, load(from + c));
          for (; c < tile.columns; ++c) scales[c] = to_float(from[c]);
          known = group;
        }
        T* to = static_cast<T*>(args.output) + at * args.output_stride + tile.column;
        T* const target = streamed ? rounded : to;
        const auto decode = [&](const auto& codes) { decode_row(target, codes, zeros, scales, tile.columns); };
        if (args.packing == Packing::kAwq4) {
          decode(AwqRow(args, tile, row));
        } else {
          const int bits = bits_of(args.packing), first = static_cast<int>(row) * bits, shift = first % 32;
          const uint32_t* words = args.codes + (tile.row * bits / 32 + first / 32) * args.code_stride + tile.column;
          shift + bits > 32 ? decode(GptqRow<true>(args, words, shift)) : decode(GptqRow<false>(args, words, shift));
        }
        if (streamed) out.put(to, target, tile.columns * static_cast<int64_t>(sizeof(T)));
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
