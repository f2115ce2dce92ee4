// Layers of experts for few pairs, on Hopper: two kernels instead of five or six.
#pragma once

#include "moe/fused_moe.h"
#include "moe/fused_moe_w8a8.h"

namespace pykv {

// Whether the layer was launched: of few pairs, both weights in int4 with or without zero points, silu_and_mul, and columns, groups and
// x in whole copies.  args: after use().
bool few_pairs_cuda(const FusedMoeArgs& args, const Launch& launch);

// ... both weights in float8_e4m3fn with scales of blocks.
bool few_pairs_w8a8_cuda(const QuantisedMoeArgs& args, const Launch& launch);

}  // namespace pykv
