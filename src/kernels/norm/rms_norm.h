// Root-mean-square norm of rows, with or without a residual that is added first.
// One kernel idea behind pykv_rms_norm and pykv_fused_add_rms_norm.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct RmsNormArgs {
  DType dtype;  // of all arrays: float32, float16 or bfloat16

  void* out;           // [num_rows, hidden_size]; may be input
  const void* input;   // [num_rows, hidden_size]
  void* residual;      // [num_rows, hidden_size], or null; becomes z = R_T(input + residual), which is what is normed
  const void* weight;  // [hidden_size], or null: ones
  Rows out_rows, input_rows, residual_rows;

  int64_t num_rows, hidden_size;
  float epsilon;
};

PYKV_CPU_TWIN(rms_norm_cpu, RmsNormArgs)
void rms_norm_cuda(const RmsNormArgs& args, const Launch& launch);

}  // namespace pykv
