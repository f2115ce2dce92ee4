// packed_gemm of many tokens on Hopper.
#pragma once

#include "gemm/packed_gemm.h"

namespace pykv {

// Whether it was launched: not for maps, for few tokens, for an epilogue, for weights whose sums of groups are scaled, or where columns, x
// or out do not come in whole copies.
// segments: of the columns, whose sums are added in order.
bool packed_gemm_many_sm90(const PackedGemmArgs& args, int segments, const Launch& launch);

}  // namespace pykv
