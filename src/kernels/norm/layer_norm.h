// Norm of rows by their mean and variance, with or without a residual that is added first.  The idea behind
// pykv_layer_norm.
#pragma once

#include "cpu/isa.h"
#include "norm/row_norm.h"

namespace pykv {

struct LayerNormArgs : RowNormArgs {
  RowWeights bias;  // [hidden_size]; not there: zeros
};

PYKV_CPU_TWIN(layer_norm_cpu, LayerNormArgs)
void layer_norm_cuda(const LayerNormArgs& args, const Launch& launch);

}  // namespace pykv
