// Root-mean-square norm of rows, then codes by the largest magnitude of each row or of groups within it.  The idea behind
// pykv_rms_norm_dynamic_per_token_quant and pykv_rms_norm_per_block_quant.
#pragma once

#include "cpu/isa.h"
#include "norm/row_norm.h"

namespace pykv {

struct RmsNormDynamicQuantArgs : RowNormArgs {
  bool int8;                       // the codes: int8 instead of E4M3
  bool per_token;                  // one scale for each row, by which E4M3 divides; else all multiply with its inverse
  float* scales;                   // [num_rows, hidden_size / group_size]
  int64_t scale_row, scale_group;  // strides, elements
  int64_t group_size;              // hidden_size: one scale for each row
  bool bounded;                    // the largest magnitude counts as scale_ub at most
  Parameter scale_ub;

  // By which what is at most `most` becomes a code.  Zeros have one too: the smallest.
  PYKV_HOST_DEVICE float scale_of(float most, float bound) const {
    const float scale = (bound < most ? bound : most) / (int8 ? 127.0f : 448.0f);
    const float smallest = int8 ? 0x1p-23f : 1.0f / (448.0f * 512.0f);
    return scale > smallest ? scale : smallest;
  }
  PYKV_HOST_DEVICE float bound() const { return bounded ? float{scale_ub} : __builtin_huge_valf(); }
};

PYKV_CPU_TWIN(rms_norm_dynamic_quant_cpu, RmsNormDynamicQuantArgs)
void rms_norm_dynamic_quant_cuda(const RmsNormDynamicQuantArgs& args, const Launch& launch);

}  // namespace pykv
