// The CUDA element types by the names that kernels use.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dispatch.h"

namespace pykv {

using bf16 = __nv_bfloat16;

template <>
inline constexpr DType kDTypeOf<half> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<bf16> = DType::kBFloat16;

}  // namespace pykv
