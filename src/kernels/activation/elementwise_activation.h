// An activation of every element.  The idea behind pykv_gelu_new, gelu_fast, gelu_quick, relu2 and xielu.
#pragma once

#include "core/args.h"
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
};

PYKV_CPU_TWIN(gelu_tanh_cpu, ElementwiseActivationArgs)
void gelu_tanh_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(gelu_quick_cpu, ElementwiseActivationArgs)
void gelu_quick_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(relu2_cpu, ElementwiseActivationArgs)
void relu2_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

PYKV_CPU_TWIN(xielu_cpu, ElementwiseActivationArgs)
void xielu_cuda(const ElementwiseActivationArgs& args, const Launch& launch);

}  // namespace pykv
