// An activation of one part of each row times the other part.  The idea behind all pykv_..._and_mul.
#pragma once

#include "core/args.h"
#include "core/valid_rows.h"
#include "cpu/isa.h"

namespace pykv {

struct GatedActivationArgs {
  DType dtype;         // float32, float16 or bfloat16
  DType result_dtype;  // the same; where there is a scale kFloat8E4M3 or kInt8

  void* result;       // [num_rows, width]
  const void* input;  // [num_rows, 2 * width]
  Rows result_rows, input_rows;

  int64_t num_rows, width;
  int64_t gate,
      up;  // elements from the start of a row of input to what is activated, and to what it is multiplied with

  float alpha, beta,
      limit;        // of the activations that have them; limit is the threshold of fatrelu, linear_beta of situ
  Parameter scale;  // of a quantised result
  RowMask mask;
};

PYKV_CPU_TWIN(silu_and_mul_cpu, GatedActivationArgs)
void silu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(silu_and_mul_quant_cpu, GatedActivationArgs)
void silu_and_mul_quant_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(silu_and_mul_with_clamp_cpu, GatedActivationArgs)
void silu_and_mul_with_clamp_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_and_mul_cpu, GatedActivationArgs)
void gelu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_tanh_and_mul_cpu, GatedActivationArgs)
void gelu_tanh_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(fatrelu_and_mul_cpu, GatedActivationArgs)
void fatrelu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(swigluoai_and_mul_cpu, GatedActivationArgs)
void swigluoai_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(swiglustep_and_mul_cpu, GatedActivationArgs)
void swiglustep_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(situ_and_mul_cpu, GatedActivationArgs)
void situ_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch);

}  // namespace pykv
