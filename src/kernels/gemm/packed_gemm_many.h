// packed_gemm on CUDA for many rows of x: the same bits as from packed_gemm.cu, sooner.
#pragma once

#include "gemm/packed_gemm.h"

namespace pykv {

bool packed_gemm_is_of_many(const PackedGemmArgs& args, int device);
void packed_gemm_many_cuda(const PackedGemmArgs& args, const Launch& launch);
// For any number of rows, where has_warpgroups (cuda/device.h).
void packed_gemm_sm90_cuda(const PackedGemmArgs& args, const Launch& launch);

}  // namespace pykv
