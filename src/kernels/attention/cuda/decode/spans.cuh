// Few KV heads over many keys: several clusters beside each other have one KV head of a sequence, and each a span of its keys,
// for a cluster alone would leave most of the device idle, and the line would leave a piece for each of its blocks.
//
// Tiles go to warps, blocks and clusters in turn, so that a span is no piece of the sequence, and where a warp's first tile
// lies depends on no length.  Short sequences are left to the first cluster, and the others end.
#pragma once

#include "attention/cuda/decode/results.cuh"
#include "attention/cuda/merge/pieces.cuh"

namespace pykv::attention {

template <class S>
struct ClusterSpans {
  static constexpr int kQuads = ColumnResults<S>::kQuads;

  const Problem& p;
  const int warp = warp_of_group<S>(), warps = blockDim.x / 32;
  const int rank = p.by_cluster.remainder(blockIdx.x), cluster_index = p.by_cluster.quotient(blockIdx.x);
  const int place = S::kSpans ? p.by_spans.quotient(cluster_index) : cluster_index;
  int used_spans = all_spans();

  __device__ int all_spans() const { return static_cast<int>(p.by_spans.d); }
  __device__ int span() const { return S::kSpans ? p.by_spans.remainder(cluster_index) : 0; }
  __device__ int spans() const { return S::kSpans ? used_spans : 1; }
  __device__ bool is_first() const { return span() == 0; }
  __device__ bool is_left_out() const { return S::kSpans && span() >= used_spans; }

  // Of so many keys.
  __device__ void use_spans(int keys) { used_spans = keys > p.keys_alone ? all_spans() : 1; }

  // Of the warp's i-th tile the first key.
  __device__ int tile_place(int i) const {
    return (((i * spans() + span()) * warps + warp) * p.cluster + rank) * S::kTile;
  }

  // Four columns, the sums of this cluster.  is_first: of those that this block finishes.
  __device__ void leave_piece(int item, bool is_first, const auto& sum) const {
    const int column = item / kQuads, quad = item % kQuads;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * p.rows + column;
    if (quad == 0 || is_first) p.partial_stats[at] = {sum.maximum, sum.sum};
    reinterpret_cast<float4*>(p.partial + at * p.pitch)[quad] = sum.o;
  }

  __device__ PiecesOfSpans pieces() const { return {p, cluster_index, span(), used_spans, rank}; }
};

}  // namespace pykv::attention
