// Decoding with batch_invariant: the four warps of a block take the parts of a chunk (merge/exact.cuh), each in
// sums of its own, and add them up.  Four queries at a time, through memory of their own, so that copies of keys and values
// go on meanwhile.
#pragma once

#include "attention/cuda/decode/results.cuh"
#include "attention/cuda/merge/exact.cuh"

namespace pykv::attention {

template <class S>
struct ChunkSums {
  using State = typename ColumnQueries<S>::State;
  static constexpr int kD = S::kD, kTile = S::kTile, kQueryTiles = ColumnQueries<S>::kQueryTiles;

  static constexpr int kPartTiles = kPartTokens / kTile;
  static constexpr int kRoundColumns = 4, kRoundItems = kRoundColumns * kD / 4;  // four columns of a query each
  static constexpr int kLeftBytes = S::kWarps * kRoundItems * 16;

  // What a thread keeps of the chunks: the first round's in registers where there is room for it.
  static constexpr int kRoundQuads = (kRoundItems + kThreads - 1) / kThreads;
  static constexpr bool kFirstIsNear = S::kColumns == 8;
  static constexpr int kFarRounds = S::kColumns / kRoundColumns - (kFirstIsNear ? 1 : 0);
  using Near = ExactQuad[kRoundQuads];
  using Far = ExactQuad[kFarRounds * kRoundQuads];

  const Problem& p;
  ColumnResults<S> results{p};
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  // Of the i-th tile of this warp's part.
  __device__ int token_in_chunk(int chunk, int i) const {
    return chunk * kChunkTokens + warp * kPartTokens + i * kTile;
  }

  // body(kept, column, d): what the thread keeps of query `column` from dimension `d` on; before_round(round) comes first.
  __device__ void for_each_kept(Near& near, Far& far, auto&& before_round, auto&& body) const {
    const auto visit = [&](int round, int j, ExactQuad& kept) {
      const int x = threadIdx.x + j * kThreads, column = round * kRoundColumns + x / (kD / 4);
      if (x < kRoundItems && column < p.group) body(kept, column, x % (kD / 4) * 4);
    };
    if constexpr (kFirstIsNear) {
      before_round(0);
#pragma unroll
      for (int j = 0; j < kRoundQuads; ++j) visit(0, j, near[j]);
    }
    constexpr int kFirst = kFirstIsNear ? 1 : 0;
#pragma unroll 1
    for (int round = kFirst; round * kRoundColumns < p.group; ++round) {
      before_round(round);
#pragma unroll 1
      for (int j = 0; j < kRoundQuads; ++j) visit(round, j, far[(round - kFirst) * kRoundQuads + j]);
    }
  }

  static __device__ void clear_kept(Near& near, Far& far) {
    for (ExactQuad& x : near) x.clear();
    for (ExactQuad& x : far) x.clear();
  }

  __device__ void leave_round(const State& state, int round, float* to, float2 (&stats)[S::kColumns]) const {
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      if (i != round / 2) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = i * 8 + lane % 4 * 2 + e;
        float sum = state.sum[i][e];
        for (int m = 4; m < 32; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        if (column >= p.group || column / kRoundColumns != round) continue;
        if (lane / 4 == 0) stats[column] = {state.maximum[i][e], sum};
        results.store_sums(state, i, e, to, column % kRoundColumns);
      }
    }
  }

  // The warps add up what they found in a chunk.
  __device__ void end_chunk(State& state, float* left, float2 (*stats)[S::kColumns], Near& near, Far& far) const {
    constexpr int kWarp = kRoundItems * 4;
    const auto leave = [&](int round) {
      __syncthreads();  // nobody reads what was left before
      leave_round(state, round, left + warp * kWarp, stats[warp]);
      __syncthreads();
    };
    for_each_kept(near, far, leave, [&](ExactQuad& kept, int column, int d) {
      PartsOfChunk sum;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) {
        const int place = sum_place<S::kD>(column % kRoundColumns, d);
        sum.add(stats[w][column], *reinterpret_cast<const float4*>(left + w * kWarp + place));
      }
      kept.add(sum.o, sum.sum, sum.maximum);
    });
    ColumnQueries<S>::clear_sums(state);
  }
};

}  // namespace pykv::attention
