// Weights in the block formats of GGUF to floats.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "dequantization/gguf_types.h"

namespace pykv {

struct GgmlDequantizeArgs {
  gguf::Type type;
  DType dtype;  // of the output
  const void* blocks;
  void* output;
  int64_t num_rows, row_elements, row_bytes;
  Rows block_rows, output_rows;  // strides in bytes, and in elements
};

PYKV_CPU_TWIN(ggml_dequantize_cpu, GgmlDequantizeArgs)
void ggml_dequantize_cuda(const GgmlDequantizeArgs& args, const Launch& launch);

}  // namespace pykv
