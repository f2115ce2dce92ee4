// Columns in another order: what activations are to a weight whose rows were sorted by group (act-order).
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct PermuteColsArgs {
  int32_t item;  // bytes of an element: 1, 2, 4 or 8
  const void* input;
  void* output;
  Index order;  // output column -> input column
  int64_t num_rows, columns;
  Rows input_rows, output_rows;         // elements
  int64_t input_column, output_column;  // elements from one to the next
};

PYKV_CPU_TWIN(permute_cols_cpu, PermuteColsArgs)
void permute_cols_cuda(const PermuteColsArgs& args, const Launch& launch);

}  // namespace pykv
