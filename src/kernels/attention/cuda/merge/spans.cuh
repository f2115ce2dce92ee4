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
    constexpr int kLanes = 4;  // each with every fourth piece
    join_pieces<Sum, 1, kLanes>(p, spans, slot_of, quads, first, first + count, store, team);
  }
};

}  // namespace pykv::attention
