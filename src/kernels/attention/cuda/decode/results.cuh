// What comes of queries that are columns of the MMAs (decode/columns.cuh): the sums of a warp, where it leaves them for
// the others of its block, and how those are added up.
#pragma once

#include "attention/cuda/decode/queries.cuh"

namespace pykv::attention {

// What the warps of a block leave for each other.
template <class S>
struct alignas(16) ColumnStats {
  float2 of[S::kWarps][S::kColumns];  // maximum (base 2) and sum of each query
};

template <class S>
struct ColumnResults {
  using Queries = ColumnQueries<S>;
  using State = typename Queries::State;
  static constexpr int kD = S::kD, kQueryTiles = Queries::kQueryTiles, kSums = Queries::kSums;

  const Problem& p;
  Queries queries{p};
  const int lane = threadIdx.x % 32;

  // Are all sums of the warp finite?
  static __device__ bool are_finite(const State& state) {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) zero = fmaf(state.o[i][n][e], 0.f, zero);
      }
    }
    return __all_sync(~0u, zero == 0);
  }

  // The dimension of o[n][2 h + .].
  __device__ int dimension(int n, int h) const {
    if constexpr (S::kRaw) return lane / 4 * (kD / 8) + n * 2 + h;
    return n * 16 + (S::kPermutedOutput ? lane / 4 * 2 + h : h * 8 + lane / 4);
  }

  // The results of a column are so many times four dimensions of its head, of which d is at tile_dimension() in the sums.
  static constexpr int kQuads = S::kFolded ? kD / 8 : kD / 4;
  __device__ int tile_dimension(int column, int d) const {
    return S::kFolded ? d + queries.half_of(column) * p.a.head_size : d;
  }

  // What a warp leaves for others: its sums at sum_place().
  static constexpr int kLeftBytes = S::kColumns * kD * 4;

  __device__ void store_sums(const State& state, int i, int e, float* to, int column) const {
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      const auto& o = state.o[i][n];
      if constexpr (S::kRaw) {
        *reinterpret_cast<float2*>(to + sum_place<kD>(column, dimension(n, 0))) = {o[e] / kE2m1Unit,
                                                                                   o[2 + e] / kE2m1Unit};
      } else if constexpr (S::kPermutedOutput) {
        *reinterpret_cast<float2*>(to + sum_place<kD>(column, dimension(n, 0))) = {o[e], o[2 + e]};
      } else {
        to[sum_place<kD>(column, dimension(n, 0))] = o[e];
        to[sum_place<kD>(column, dimension(n, 1))] = o[2 + e];
      }
    }
  }

  __device__ void leave(const State& state, float* to, float2 (&stats)[S::kColumns]) const {
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = queries.column_of(i, e);
        float sum = state.sum[i][e];
        for (int m = 4; m < 32; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        if (column >= queries.columns()) continue;
        if (lane / 4 == 0) stats[column] = {state.maximum[i][e], sum};
        store_sums(state, i, e, to, column);
      }
    }
  }

  __device__ Row row_of_column(int sequence, int len, int kv_head, int column) const {
    return {sequence, len - 1, queries.query_head(kv_head, column), true};
  }
};

// Adds up parts of one query: (maximum, sum) and four columns.
struct PartSum {
  float maximum = -INFINITY, sum = 0;
  float4 o = {0, 0, 0, 0};

  // `top` is the largest maximum of all parts.
  __device__ void add(float2 stats, float4 x, float top) {
    const float weight = stats.x == -INFINITY ? 0.f : power_of_2(stats.x - top);
    sum += weight * stats.y;
    o = {o.x + weight * x.x, o.y + weight * x.y, o.z + weight * x.z, o.w + weight * x.w};
  }

  // Of `count` parts, at most kMost.  What is done once is better done without loops: instructions come from memory, and behind
  // a jump they come late.
  template <int kMost>
  static __device__ PartSum of_parts(int count, auto&& stats_of, auto&& columns_of) {
    PartSum sum;
    float2 stats[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      stats[i] = {-INFINITY, 0};
      if (i < count) stats[i] = stats_of(i);
      sum.maximum = fmaxf(sum.maximum, stats[i].x);
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      float4 x = {0, 0, 0, 0};
      if (i < count) x = columns_of(i);
      sum.add(stats[i], x, sum.maximum);
    }
    return sum;
  }
};

}  // namespace pykv::attention
