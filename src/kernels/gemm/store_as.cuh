// Results of products, in a dtype that only the call knows.
#pragma once

#include "cuda/vec.cuh"

namespace pykv {

// dtype: bfloat16, float16 or float32; at: elements from `to`.
__device__ inline void store_as(DType dtype, void* to, int64_t at, float x) {
  if (dtype == DType::kBFloat16)
    static_cast<bf16*>(to)[at] = from_float<bf16>(x);
  else if (dtype == DType::kFloat16)
    static_cast<half*>(to)[at] = from_float<half>(x);
  else
    static_cast<float*>(to)[at] = x;
}

}  // namespace pykv
