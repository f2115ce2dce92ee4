// silu of one half of each row times the other half, quantised with a scale for each block of neighbours.
// The idea behind pykv_silu_and_mul_per_block_quant.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct GatedActivationPerBlockArgs {
  DType dtype, out_dtype;  // float32, float16 or bfloat16; kFloat8E4M3 or kInt8

  void* out;          // [num_rows, width]
  const void* input;  // [num_rows, 2 * width]
  float* scales;      // [num_rows, width / group_size]
  Rows out_rows, input_rows;
  int64_t scales_row, scales_group;  // strides of scales

  int64_t num_rows, width, group_size;
  Parameter most;  // of a scale

  // What the largest number of a block becomes, and the smallest scale.
  PYKV_HOST_DEVICE float largest() const { return out_dtype == DType::kInt8 ? 127.0f : 448.0f; }
  PYKV_HOST_DEVICE float least() const { return out_dtype == DType::kInt8 ? 0x1p-23f : 1.0f / (448.0f * 512.0f); }
};

PYKV_CPU_TWIN(gated_activation_per_block_cpu, GatedActivationPerBlockArgs)
void gated_activation_per_block_cuda(const GatedActivationPerBlockArgs& args, const Launch& launch);

}  // namespace pykv
