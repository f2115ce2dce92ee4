// Rows that are shared out among blocks of threads, a vector to each thread: a block has a part of one row.
#pragma once

#include <algorithm>

#include "core/error.h"
#include "cuda/dependent.cuh"

namespace pykv {

struct RowBlocks {
  uint32_t parts;        // blocks of a row
  uint32_t num_vectors;  // of a row
  uint32_t threads, blocks;

  RowBlocks(int64_t rows, int64_t vectors) {
    constexpr int64_t kMostThreads = 256;
    const int64_t each = (vectors + kMostThreads - 1) / kMostThreads;  // blocks of a row
    const int64_t size = ((vectors + each - 1) / each + 31) / 32 * 32;
    if (rows * each > 0x7fffffff || vectors > 0x7fffffff)
      fail(PYKV_NOT_IMPLEMENTED, "2^31 blocks of rows are not supported");
    parts = static_cast<uint32_t>(each);
    num_vectors = static_cast<uint32_t>(vectors);
    threads = static_cast<uint32_t>(size);
    blocks = static_cast<uint32_t>(rows * each);
  }

  __device__ int64_t row() const { return blockIdx.x / parts; }
  // num_vectors and more: there is none.
  __device__ uint32_t vector() const { return blockIdx.x % parts * blockDim.x + threadIdx.x; }
};

}  // namespace pykv
