// Root-mean-square norm of rows, with or without a residual that is added first.
// One kernel idea behind pykv_rms_norm, pykv_fused_add_rms_norm, pykv_gemma_rms_norm and pykv_gemma_fused_add_rms_norm.
#pragma once

#include "cpu/isa.h"
#include "norm/row_norm.h"

namespace pykv {

struct RmsNormArgs : RowNormArgs {
  float weight_offset;  // is added to each weight
  bool rounds_last;     // what is normed is input + residual in fp32, rounded where it is kept alone
};

PYKV_CPU_TWIN(rms_norm_cpu, RmsNormArgs)
void rms_norm_cuda(const RmsNormArgs& args, const Launch& launch);

}  // namespace pykv
