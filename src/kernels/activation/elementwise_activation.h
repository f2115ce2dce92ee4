// An activation of every element.  The idea behind pykv_gelu_new, gelu_fast, gelu_quick, relu2, relu_squared and xielu, and
// behind what pykv_masked_moe_activation has without a product.
#pragma once

#include "core/args.h"
#include "core/valid_rows.h"
#include "cpu/isa.h"

namespace pykv {

struct ElementwiseActivationArgs {
  DType dtype;  // of both arrays: float32, float16 or bfloat16

  void* out;          // [num_rows, width]
  const void* input;  // [num_rows, width]
  Rows out_rows, input_rows;

  int64_t num_rows, width;

  Parameter alpha_p, alpha_n;  // of xielu, and so are
  float beta, eps;
  RowMask mask;
};

PYKV_CPU_TWIN(silu_cpu, ElementwiseActivationArgs)
void silu_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_cpu, ElementwiseActivationArgs)
void gelu_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_tanh_cpu, ElementwiseActivationArgs)
void gelu_tanh_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_quick_cpu, ElementwiseActivationArgs)
void gelu_quick_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(relu2_cpu, ElementwiseActivationArgs)
void relu2_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(relu_squared_cpu, ElementwiseActivationArgs)
void relu_squared_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(xielu_cpu, ElementwiseActivationArgs)
void xielu_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

}  // namespace pykv
