// packed_gemm on Hopper of codes that are multiplied by the scales of their groups as they are decoded.
#pragma once

#include "gemm/packed_gemm.h"

namespace pykv {

// Where is_folded() of packed_codes.cuh.
void packed_gemm_folded_sm90(const PackedGemmArgs& args, const Launch& launch);

}  // namespace pykv
