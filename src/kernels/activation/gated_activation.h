// An activation of one half of each row times the other half.  The idea behind pykv_silu_and_mul
// and pykv_gelu_tanh_and_mul.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct GatedActivationArgs {
  DType dtype;  // of both arrays: float32, float16 or bfloat16

  void* result;       // [num_rows, width]
  const void* input;  // [num_rows, 2 * width]: gate, up
  Rows result_rows, input_rows;

  int64_t num_rows, width;
};

PYKV_CPU_TWIN(silu_and_mul_cpu, GatedActivationArgs)
void silu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_tanh_and_mul_cpu, GatedActivationArgs)
void gelu_tanh_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

}  // namespace pykv
