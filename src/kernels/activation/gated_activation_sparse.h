// gelu of what sticks out of one half of each row, times the other half.  The idea behind pykv_gelu_and_mul_sparse.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct GatedActivationSparseArgs {
  DType dtype;  // of both arrays: float32, float16 or bfloat16

  void* out;          // [num_rows, width]
  const void* input;  // [num_rows, 2 * width]
  Rows out_rows, input_rows;

  int64_t num_rows, width;
  float deviations;  // from the mean of a gate to where it sticks out
  bool tanh;         // the form of gelu
};

PYKV_CPU_TWIN(gated_activation_sparse_cpu, GatedActivationSparseArgs)
void gated_activation_sparse_cuda(const GatedActivationSparseArgs& args, const Launch& launch);

}  // namespace pykv
