// Up to 64 queries of a tile in shared memory, for four warps whose products have tokens as rows and queries as columns, or for two
// groups of four; and who these warps are.
#pragma once

#include "attention/cuda/half_queries.cuh"
#include "attention/cuda/rows.cuh"
#include "attention/cuda/schedule/line.cuh"
#include "attention/cuda/verify/shape.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

// A query.
struct ColumnState {
  int position;
  float slope, scale;
};

// Shared by the four warps.
template <int kColumns>
struct alignas(16) ColumnsScratch {
  PlanScratchOf<2 * kThreads> plan;
  ColumnState rows[kColumns];
  alignas(16) float maxima[4][kColumns / 4 + 4];  // by lane % 4, of the columns that such lanes have
  // Of each column: what the warps have found; or, alone, what undoes the scaling of its query, by how much its maximum has risen,
  // and in the end what its sums are multiplied by; and its query's largest element.
  float of_warps[4][kColumns];

  __device__ float& maximum(int column) { return maxima[column % 8 / 2][column / 8 * 2 + column % 2]; }
};

template <class S>
struct VerifyQueries {
  using Scratch = ColumnsScratch<S::kRows>;
  static constexpr int kD = S::kD, kColumns = S::kRows;
  static constexpr int kHeads = S::kFolded ? 2 : 1, kOwn = kColumns / kHeads;  // columns of a KV head, side by side

  const Problem& p;
  Scratch& scratch;
  uint32_t address;                           // in shared memory
  const int thread = threadIdx.x % kThreads;  // of those who compute

  // A group of those who compute: of one the compiler knows the barrier, and leaves others to other blocks.
  static __device__ int group() { return computing_group(S::kGroups); }
  static __device__ int barrier() { return kGroupBarrier + group(); }
  static __device__ void sync() { named_barrier_sync(barrier(), kThreads); }

  // All groups, which have the queries in common.  Their scratches lie side by side.
  static constexpr int kAllThreads = S::kGroups * kThreads;
  __device__ Scratch& first_scratch() const { return (&scratch)[-group()]; }
  static __device__ void sync_all() {
    named_barrier_sync(S::kGroups == 1 ? kGroupBarrier : kAllGroupsBarrier, kAllThreads);
  }

  // Of two KV heads in a tile (S::kFolded) each has half of the columns, and one part of the dimensions.  The row of a column:
  static __device__ int row_index(const Problem& p, int column) {
    if constexpr (kHeads == 1) return column;
    const int group = p.tile_heads / kHeads, i = column % kOwn, token = i / group;
    return token * p.tile_heads + column / kOwn * group + i - token * group;
  }
  __device__ Row row_of_column(const Unit& u, int column) const { return row_of(p, u, row_index(p, column)); }
  static __device__ int kv_head_of(const Unit& u, int column) { return u.kv_head * kHeads + column / kOwn; }

  struct QueryScale {
    bool is_common;  // to all columns
    float undo;      // then: what scores are to be multiplied by
  };

  // For each column that is in first_scratch().of_warps[0] afterwards.
  __device__ QueryScale store_queries(const Unit& u) const {
    // Neighbouring lanes have a query together.
    constexpr int kLanes = kAllThreads / kColumns, kLoads = kD / kHeads / 8 / kLanes;
    const int member = group() * kThreads + thread, r = member / kLanes, chunk0 = member % kLanes;
    const Row row = row_of_column(u, r);
    const uint16_t* from = query_row(p, row);
    uint4 x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int d = (chunk0 + i * kLanes) * 8;
      x[i] = {0, 0, 0, 0};
      if (row.valid && d < p.a.head_size) x[i] = *reinterpret_cast<const uint4*>(from + d);
    }
    QueryScale scale{true, 1};
    if constexpr (S::kScaled) {
      const bool wide = p.a.dtype == DType::kBFloat16;
      auto& of_warps = first_scratch().of_warps;
      float *undo_of = of_warps[0], *largest = of_warps[1];
      float of_row = 0;
      if (wide) {
#pragma unroll
        for (const uint4& y : x) of_row = fmaxf(of_row, largest_of(y));
        for (int m = 1; m < kLanes; m *= 2) of_row = fmaxf(of_row, __shfl_xor_sync(~0u, of_row, m));
        if (chunk0 == 0) largest[r] = of_row;
      }
      sync_all();         // nobody reads any more what the segment before has left there
      HalfScale by(0.f);  // by one
      if (wide) {
        const CommonHalfScale common(largest, kColumns);
        scale = {common.suits, common.by.undo};
        by = common.suits ? common.by : HalfScale(of_row);
#pragma unroll
        for (uint4& y : x) y = by.halves(y);
      }
      if (chunk0 == 0) undo_of[r] = by.undo;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      store_query_chunk<S::kNarrow>(x[i], chunk0 + i * kLanes,
                                    [&](int c) { return address + c / 8 * kColumns * 128 + swizzled<128>(r, c % 8); });
    }
    sync_all();  // what scaled them is there, and nobody reads the maxima of the segment before
    return scale;
  }
};

}  // namespace pykv::attention
