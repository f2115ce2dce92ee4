// Rows moved as bytes, by ids that are on the device: the idea behind shuffle_rows (each row of the result from one of the
// source) and moe_permute (each row of the source to several of the result).
#pragma once

#include "cpu/isa.h"
#include "moe/sort_pairs.h"

namespace pykv {

struct MoveRowsArgs {
  const char* source;
  char* target;
  int64_t source_stride, target_stride, row_bytes;  // bytes
  int64_t num_source_rows, num_target_rows;

  // Row i of the target is row map[i] of the source; zeros where there is no such row, which is reported unless negative.
  Index map;  // data null: otherwise, and
  // row t of the source goes to the rows places.at(t, 0) ... places.at(t, top_k - 1), to those of them below *num_valid.
  PairIds places;
  int64_t top_k;
  PairIds num_valid;  // one number

  const char* report;
};

PYKV_CPU_TWIN(move_rows_cpu, MoveRowsArgs)
void move_rows_cuda(const MoveRowsArgs& args, const Launch& launch);

}  // namespace pykv
