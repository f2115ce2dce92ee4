// Numbers to codes by scales that are given: one, or one for each rectangle of rows and columns.  The idea behind
// static_scaled_int8_quant and static_scaled_fp8_quant; and the second half of dynamic_scaled_fp8_quant, whose first finds the
// largest magnitude of an array.
#pragma once

#include "core/args.h"
#include "core/codes.h"
#include "core/valid_rows.h"
#include "cpu/isa.h"

namespace pykv {

struct StaticQuantArgs {
  DType dtype;
  QuantCode codes;
  bool divides;       // codes of x / scale; else of x * (1 / scale)
  bool shifted;       // plus a zero point
  bool from_largest;  // scale = largest magnitude / largest code; first it has to be found, and is written
  const void* input;  // [rows, width]
  void* out;
  Rows input_rows, out_rows;
  int64_t rows, width;
  RowCount valid;    // of one given scale: others are neither read nor written
  Parameter number;  // the one scale; or, where `scales` are given
  const float* scales;
  int64_t scale_row, scale_column;    // elements, from group to group
  int64_t group_rows, group_columns;  // that share a scale
  const int32_t* zero_point;          // of shifted codes; null: `zero`
  int32_t zero;
  float* scale_out;  // where from_largest
};

PYKV_CPU_TWIN(static_quant_cpu, StaticQuantArgs)
void static_quant_cuda(const StaticQuantArgs& args, const Launch& launch);

}  // namespace pykv
