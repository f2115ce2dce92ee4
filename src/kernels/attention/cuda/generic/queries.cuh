// Rows of a query tile, from memory to where the tensor cores take them.
//
// Fragments of 16 rows for a warp may stay in registers for a whole segment; others lie in shared memory.  For elements of one byte
// the dimensions of a fragment are permuted, see generic/softmax.cuh.
#pragma once

#include "attention/cuda/half_queries.cuh"
#include "attention/cuda/rows.cuh"
#include "attention/cuda/schedule/line.cuh"
#include "attention/cuda/tile_shape.cuh"

namespace pykv::attention {

struct RowState {
  int position;
  float slope, scale;
  int sparse_offset;
};

template <class S>
struct alignas(16) Scratch {
  PlanScratchOf<S::kBlock> plan;
  RowState rows[4][S::kWarpRows];
};

template <class S>
struct RowQueries {
  static constexpr int kD = S::kD, kSteps = kD / 16;

  const Problem& p;
  Scratch<S>& scratch;
  uint32_t address;  // in shared memory, of rows that do not stay in registers
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  // The rows into shared memory.  A warp touches its own alone.
  __device__ void load_query_rows(const Unit& u, int row0) {
    constexpr int kQueryChunks = kD / 8, kLoads = S::kWarpRows * kQueryChunks / 32, kBatch = kLoads < 8 ? kLoads : 8;
#pragma unroll 1
    for (int batch = 0; batch < kLoads; batch += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = (batch + i) * 32 + lane, chunk = x % kQueryChunks;
        const Row row = row_of(p, u, row0 + x / kQueryChunks);
        v[i] = {0, 0, 0, 0};
        if (row.valid && chunk * 8 < p.a.head_size)
          v[i] = *reinterpret_cast<const uint4*>(query_row(p, row) + chunk * 8);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = (batch + i) * 32 + lane, chunk = x % kQueryChunks, r = x / kQueryChunks;
        store_chunk(v[i], r, row0 + r, chunk);
      }
    }
  }

  __device__ void store_chunk(uint4 v, int warp_row, int r, int chunk) {
    if (S::kScaled && p.a.dtype == DType::kBFloat16) {
      const float undo = halve_chunk<kD / 8>(v);
      if (chunk == 0) scratch.rows[warp][warp_row].scale *= undo;
    }
    store_query_chunk<S::kNarrow>(v, chunk, [&](int c) { return address + swizzled<2 * kD>(r, c); });
  }

  __device__ static uint32_t load_pair(const uint16_t* q, bool read) {
    return read ? *reinterpret_cast<const uint32_t*>(q) : 0;
  }

  // Rows straight to fragments: with one-byte elements dimensions 4c .. 4c + 3 of 16 take places 2c, 2c + 1, 2c + 8 and
  // 2c + 9, with others each its own.
  __device__ void load_query_fragments(const Unit& u, int row0, int rows, uint32_t (&a)[kSteps][4]) {
    const int c = lane % 4, head_size = p.a.head_size;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = h * 8 + lane / 4;
      const Row row = row_of(p, u, row0 + r);
      const bool read = row0 + r < rows && row.valid;
      const uint16_t* q = query_row(p, row);
      if (row0 + h * 8 < rows) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const int d0 = k * 16 + (S::kNarrow ? 4 : 2) * c, d1 = S::kNarrow ? d0 + 2 : d0 + 8;
          a[k][h] = load_pair(q + d0, read && d0 < head_size);
          a[k][2 + h] = load_pair(q + d1, read && d1 < head_size);
        }
      } else {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) a[k][h] = a[k][2 + h] = 0;
      }
      if (S::kScaled && p.a.dtype == DType::kBFloat16 && row0 + h * 8 < rows) {
        float largest = 0;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) largest = fmaxf(largest, fmaxf(largest_of(a[k][h]), largest_of(a[k][2 + h])));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const HalfScale by(largest);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          a[k][h] = by.halves(a[k][h]);
          a[k][2 + h] = by.halves(a[k][2 + h]);
        }
        if (c == 0) scratch.rows[warp][r].scale *= by.undo;
      }
    }
  }

  // Starts the way of a tile's queries from memory, so that its beginning finds them near.
  __device__ void prefetch_queries(const Unit& u) const {
    if constexpr (S::kQueriesInRegisters) {
      const Row row = row_of(p, u, warp * S::kWarpRows + lane / 2);
      if (row.valid && lane % 2 * 64 < p.a.head_size) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(query_row(p, row) + lane % 2 * 64));
      }
    }
  }
};

}  // namespace pykv::attention
