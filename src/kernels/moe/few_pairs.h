// A layer of experts in int4 for few pairs, on Hopper: two kernels instead of five.
#pragma once

#include "moe/fused_moe.h"

namespace pykv {

// Whether the layer was launched: of few pairs, both weights in int4 with or without zero points, silu_and_mul, and columns, groups and
// x in whole copies.  args: after use().
bool few_pairs_cuda(const FusedMoeArgs& args, const Launch& launch);

}  // namespace pykv
