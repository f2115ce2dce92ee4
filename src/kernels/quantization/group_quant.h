// Rows to codes with a scale for each group of neighbours: the idea behind per_token_group_*_quant, of nvfp4, mxfp4 and mxfp8, and
// of what makes such rows by an activation first.
#pragma once

#include "core/args.h"
#include "core/codes.h"
#include "core/valid_rows.h"
#include "cpu/isa.h"

namespace pykv {

// What the numbers of a row are: its elements; or an activation of its first half times its second, rounded to the dtype.
enum class RowSource : uint8_t { kElements, kSiluAndMul, kSituAndMul };

// Rows of experts, one expert after the other.
struct ExpertRows {
  Index first;         // [experts], and one more where there are no sizes, of the rows; null: all rows are one expert's
  Index scales_first;  // [experts] where the scales of its rows begin, in rows
  const int32_t* sizes;  // [experts, 3], rows first: where another expert's rows need not follow; or null
  int32_t experts;
  int64_t scale_rows;  // there are
  const char* report;  // of scales that lie elsewhere
};

// Among the scales, of a row: whose it is, and whether it is the last of its expert and has a place at all.
struct ScaleRow {
  int64_t row;
  int expert;
  bool last, there;
};

struct GroupQuantArgs {
  DType dtype;
  RowSource source;
  QuantCode codes;
  bool four_over_six;  // of e4m3 scales: the one for which 4 is the largest code where that is closer
  int8_t tile_bits;    // scales in tiles of so many rows, as a power of two (7 or 3), and 4 groups; 0: by strides
  bool fill_scales;    // rows that are not there get scales of 1
  ScaleRule rule;

  const void* input;  // [rows, width], or [rows, 2 * width]
  void* out;          // [rows + zero_rows, width + padding]
  void* scales;
  Rows input_rows, out_rows, scale_rows;  // elements; of e2m1 bytes
  int64_t scale_group;                    // elements; bytes where scales are bytes
  int64_t scale_four;                     // bytes between fours of groups, whose bytes are neighbours; 0: scale_group
  int64_t tiles;                          // side by side
  int64_t rows, width, group_size;
  int64_t zero_rows;                  // behind the last one, to become zeros
  int64_t code_groups, scale_groups;  // with padding, which becomes zeros
  float beta, linear_beta;            // of situ
  ValidRows valid;
  ExpertRows of_experts;
  Parameter given;       // of e4m3 scales the global one; what fp32 scales are at most
  const float* globals;  // of e4m3 scales one for each expert, or null

  // Of ids, which may be any: it may wrap.
  PYKV_INLINE static int64_t minus(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
  }
  // Groups of a row that anything is written for.
  PYKV_INLINE int64_t groups() const { return code_groups > scale_groups ? code_groups : scale_groups; }
  // The last expert that does not begin behind the row.
  PYKV_INLINE int expert_of(int64_t row) const {
    int low = 0, high = of_experts.experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (of_experts.first[middle] <= row ? low : high) = middle;
    }
    return low;
  }
  PYKV_INLINE ScaleRow scale_row_of(int64_t row, int expert, const Reporter& report) const {
    const int64_t first = of_experts.first[expert], within = minus(row, first);
    const int64_t size =
        of_experts.sizes ? of_experts.sizes[int64_t{3} * expert] : minus(of_experts.first[expert + 1], first);
    const int64_t at = minus(of_experts.scales_first[expert], minus(0, within));
    const bool has = within >= 0 && within < size, there = has && at >= 0 && at < of_experts.scale_rows;
    if (has && !there) report(at, of_experts.scale_rows);
    return {at, expert, within == size - 1, there};
  }
  PYKV_INLINE ScaleRow scale_row_of(int64_t row, const Reporter& report) const {
    if (!of_experts.first.data) return {row, 0, row == rows - 1, true};
    return scale_row_of(row, expert_of(row), report);
  }
  PYKV_INLINE void store_scale(int64_t row, int64_t group, uint32_t stored) const {
    const int64_t at = tile_bits    ? swizzled_place(row, group, tiles, tile_bits)
                       : scale_four ? scale_rows.offset(row) + group / 4 * scale_four + group % 4
                                    : scale_rows.offset(row) + group * scale_group;
    if (rule.kind == QuantScale::kFloat || rule.kind == QuantScale::kPowerOfTwo) {
      static_cast<uint32_t*>(scales)[at] = stored;
    } else {
      static_cast<uint8_t*>(scales)[at] = static_cast<uint8_t>(stored);
    }
  }
  // Zeros for the rows behind a last one, up to a whole tile: of four neighbouring groups each clears every fourth, for all four.
  PYKV_INLINE void clear_behind(const ScaleRow& last, int64_t group) const {
    const int64_t rows_of_tile = 1 << tile_bits, first = (last.row & (rows_of_tile - 1)) + 1;
    uint8_t* const words =
        static_cast<uint8_t*>(scales) + ((((last.row >> tile_bits) * tiles + group / 4) << tile_bits) * 4);
    const bool aligned = reinterpret_cast<uintptr_t>(words) % 4 == 0;
    for (int64_t i = first + ((group - first) & 3); i < rows_of_tile; i += 4) {
      uint8_t* const word = words + 4 * word_of_tile(i, tile_bits);
      if (aligned) {
        __builtin_memset(__builtin_assume_aligned(word, 4), 0, 4);
      } else {
        __builtin_memset(word, 0, 4);
      }
    }
  }
};

PYKV_CPU_TWIN(group_quant_cpu, GroupQuantArgs)
void group_quant_cuda(const GroupQuantArgs& args, const Launch& launch);

}  // namespace pykv
