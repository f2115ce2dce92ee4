// Rows to codes with a scale for each group of neighbours: the idea behind per_token_group_*_quant, of nvfp4, mxfp4 and mxfp8, and
// of what makes such rows by an activation first.
#pragma once

#include "core/args.h"
#include "core/codes.h"
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

// Of each `rows` neighbours only the first counts[i] are there; null: all.
struct ValidRows {
  Index counts;
  int64_t rows;
  int64_t factor;  // counts are multiplied with it
};

struct GroupQuantArgs {
  DType dtype;
  RowSource source;
  CodeKind codes;
  bool four_over_six;  // of e4m3 scales: the one for which 4 is the largest code where that is closer
  bool swizzled;       // scales in tiles of 128 rows and 4 groups
  bool fill_scales;    // rows that are not there get scales of 1
  ScaleRule rule;

  const void* input;  // [rows, width], or [rows, 2 * width]
  void* out;          // [rows + zero_rows, width + padding]
  void* scales;
  Rows input_rows, out_rows, scale_rows;  // elements; of e2m1 bytes
  int64_t scale_group;                    // elements; bytes where scales are bytes
  int64_t scale_four;                     // bytes between fours of groups, whose bytes are neighbours; 0: scale_group
  int64_t tiles;                          // side by side, where swizzled
  int64_t rows, width, group_size;
  int64_t zero_rows;                  // behind the last one, to become zeros
  int64_t code_groups, scale_groups;  // with padding, which becomes zeros
  float beta, linear_beta;            // of situ
  ValidRows valid;
  ExpertRows of_experts;
  Parameter global;      // of e4m3 scales
  const float* globals;  // of e4m3 scales one for each expert, or null

  // Groups of a row that anything is written for.
  PYKV_INLINE int64_t groups() const { return code_groups > scale_groups ? code_groups : scale_groups; }
  // The place of a scale among `scales`.
  PYKV_INLINE int64_t scale_at(int64_t row, int64_t group) const {
    if (swizzled) return swizzled_place(row, group, tiles);
    if (scale_four) return scale_rows.offset(row) + group / 4 * scale_four + group % 4;
    return scale_rows.offset(row) + group * scale_group;
  }
};

PYKV_CPU_TWIN(group_quant_cpu, GroupQuantArgs)
void group_quant_cuda(const GroupQuantArgs& args, const Launch& launch);

}  // namespace pykv
