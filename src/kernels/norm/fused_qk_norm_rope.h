// Root-mean-square norm of each query and key head, then the rotation of its first elements, in place.  The idea behind
// pykv_fused_qk_norm_rope.
#pragma once

#include "core/rotation.h"
#include "cpu/isa.h"
#include "norm/row_norm.h"

namespace pykv {

struct QkNormRopeArgs {
  Rotation rotation;  // its heads are whole ones: head_size elements
  RowWeights query_weight, key_weight;
  int64_t head_size;
  float epsilon;
};

PYKV_CPU_TWIN(fused_qk_norm_rope_cpu, QkNormRopeArgs)
void fused_qk_norm_rope_cuda(const QkNormRopeArgs& args, const Launch& launch);

}  // namespace pykv
