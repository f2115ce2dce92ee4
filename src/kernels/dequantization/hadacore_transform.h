// Rows times an orthonormal Hadamard matrix.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct HadacoreTransformArgs {
  DType dtype;
  const void* input;
  void* output;
  int64_t num_rows;
  int32_t order, log2;  // a row has order * 2^log2 elements
  float scale;          // 1 / sqrt(elements)
  Rows input_rows, output_rows;
};

PYKV_CPU_TWIN(hadacore_transform_cpu, HadacoreTransformArgs)
void hadacore_transform_cuda(const HadacoreTransformArgs& args, const Launch& launch);

}  // namespace pykv
