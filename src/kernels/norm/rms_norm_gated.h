// Root-mean-square norm of groups of each row, times an activation of a gate, which comes before the norm or after it.
// The idea behind pykv_rms_norm_gated.
#pragma once

#include "cpu/isa.h"
#include "norm/row_norm.h"

namespace pykv {

// Every group is a row of its own here: num_rows counts groups, hidden_size is the size of one.
struct RmsNormGatedArgs : RowNormArgs {
  const void* gate;  // [num_rows, hidden_size], or null
  Rows gate_rows;
  int64_t groups;  // in a row of the arrays
  bool gate_first, sigmoid;
};

PYKV_CPU_TWIN(rms_norm_gated_cpu, RmsNormGatedArgs)
void rms_norm_gated_cuda(const RmsNormGatedArgs& args, const Launch& launch);

}  // namespace pykv
