// What clusters beside each other that share the keys of a KV head (decode/spans.cuh) leave for each other.
#pragma once

#include "attention/cuda/merge/pieces.cuh"

namespace pykv::attention {

// The shape of clusters whose keys others may share.
template <class Shape>
struct Spanned : Shape {
  static constexpr bool kSpans = true;
};

// Of blocks that finish the same columns, one in each cluster, each has a slot of its own: where a block's columns begin within a
// query's, another block has the others.  The last one adds up; no block waits for another.
struct PiecesOfSpans {
  const Problem& p;
  int cluster_index, span, spans, rank;

  // Of the k-th cluster's block.
  __device__ int slot(int k) const { return (cluster_index - span + k) * p.cluster + rank; }

  // When all of the team's threads have left theirs: `count` items from `first` on, `quads` of them of a column.  store(item, sum)
  template <class Sum, class Team = WholeBlock>
  __device__ void join(int quads, int first, int count, auto&& store, const Team& team = {}) const {
    const auto slot_of = [this](int k) { return slot(k); };
    let_next_kernel_start();
    team.sync();
    if (team.thread() == 0) hand_over_pieces(p, slot(span), -1, p.ticket);
    team.sync();
    if (!are_there(p, spans, slot_of, team)) return;
    // Four lanes have an item, and each of them every fourth piece.
    constexpr int kAtOnce = 4, kLanes = kMostSpans / kAtOnce, kWarpItems = 32 / kLanes;
#pragma unroll 1
    for (int i = team.thread() / kLanes; i < (count + kWarpItems - 1) / kWarpItems * kWarpItems;
         i += team.threads() / kLanes) {
      const int item = first + min(i, count - 1), column = item / quads, quad = item - column * quads;
      Sum sum = Sum::empty(), piece[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int k = j * kLanes + threadIdx.x % kLanes;
        piece[j] = k < spans ? Sum::load(p, slot(k), column, quad) : Sum::empty();
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum.add(piece[j]);
#pragma unroll
      for (int m = 1; m < kLanes; m *= 2) sum.add(sum.of_lane(m));
      if (threadIdx.x % kLanes == 0 && i < count) store(item, sum);
    }
    forget(p, spans, slot_of, team);
  }
};

}  // namespace pykv::attention
