// What both kernels of expert_gemm know.
#pragma once

#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/mma.cuh"
#include "cuda/pairs.cuh"
#include "gemm/tile_map.cuh"
#include "moe/expert_gemm.h"

namespace pykv {

constexpr int kExpertGemmSegments = 8;  // the columns are summed in so many parts, and these then in their order
constexpr int kExpertGemmColumns = 32;  // of a stage: parts are whole ones

struct ExpertGemmProblem {
  ExpertGemmArgs a;
  TileRows rows;
  Divider tiles_by;
  bool whole_vectors;  // eight neighbours can be copied at once
  bool whole_results;  // four can be written at once
};

// Eight columns of a row from `column` on, to 16 bytes of shared memory; zeros where there are none.
template <class T>
__device__ void copy_columns(const ExpertGemmProblem& p, uint32_t to, const T* row, int64_t column, bool once) {
  if (p.whole_vectors) {
    const bool inside = row && column < p.a.k;
    const void* from = inside ? row + column : p.a.weights;
    if (once)
      cp_async_16_once(to, from, inside);
    else
      cp_async_16(to, from, inside);
    return;
  }
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    bits[i] = row && column + i < p.a.k ? reinterpret_cast<const unsigned short*>(row)[column + i] : 0;
  store_shared(to, make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                              bits[6] | bits[7] << 16));
}

__device__ inline uint4 load_own(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

// For many pairs of each expert, in tiles of 64 or 128.
template <class T>
void expert_gemm_large(const ExpertGemmArgs& args, const Launch& launch, bool whole_vectors);

}  // namespace pykv
