// Tiles of rows in groups, on CUDA: no tile has rows of two groups.
#pragma once

#include "gemm/row_groups.h"

namespace pykv {

// How many tiles all groups before each have, [count + 1], in shared memory: by all threads of a block, which wait for each other.
__device__ inline void count_tiles(const RowGroups& groups, int64_t rows, int tile_rows, const Reporter& report,
                                   int32_t* before) {
  const int count = static_cast<int>(groups.count);
#pragma unroll 1
  for (int g = threadIdx.x; g < count; g += blockDim.x) {
    int64_t begin, end;
    groups.rows_of(g, rows, begin, end, [&](int64_t value, int64_t bound) {
      if (blockIdx.x == 0) report(value, bound);
    });
    before[g + 1] = static_cast<int32_t>((end - begin + tile_rows - 1) / tile_rows);
  }
  if (threadIdx.x == 0) before[0] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    int32_t sum = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
      const int at = first + static_cast<int>(threadIdx.x);
      int32_t x = at < count ? before[at + 1] : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t lower = __shfl_up_sync(~0u, x, step);
        if (static_cast<int>(threadIdx.x) >= step) x += lower;
      }
      if (at < count) before[at + 1] = sum + x;
      sum += __shfl_sync(~0u, x, 31);
    }
  }
  __syncthreads();
}

// The group that has a tile below before[count].
__device__ inline int group_of_tile(const int32_t* before, int count, int32_t tile) {
  int low = 0, high = count;  // before[low] <= tile < before[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (before[middle] <= tile ? low : high) = middle;
  }
  return low;
}

}  // namespace pykv
