// Root-mean-square norm of rows, rounded to the dtype, then to E4M3 codes by one scale for all.  The idea behind
// pykv_rms_norm_static_fp8_quant and pykv_fused_add_rms_norm_static_fp8_quant.
#pragma once

#include "cpu/isa.h"
#include "norm/row_norm.h"

namespace pykv {

struct RmsNormStaticQuantArgs : RowNormArgs {
  Parameter scale;
};

PYKV_CPU_TWIN(rms_norm_static_quant_cpu, RmsNormStaticQuantArgs)
void rms_norm_static_quant_cuda(const RmsNormStaticQuantArgs& args, const Launch& launch);

}  // namespace pykv
