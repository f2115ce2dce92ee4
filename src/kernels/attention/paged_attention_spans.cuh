// Few KV heads over many keys: several clusters beside each other have one KV head of a sequence, and each a span of its keys,
// for a cluster alone would leave most of the device idle, and the line would leave a piece for each of its blocks.
//
// Tiles go to warps, blocks and clusters in turn, so that a span is no piece of the sequence, and where a warp's first tile
// lies depends on no length.  Of the blocks that finish the same columns, one in each cluster, the last adds up; no block waits
// for another.  Short sequences are left to the first cluster, and the others end.
#pragma once

#include <algorithm>

#include "attention/paged_attention_decode_load.cuh"
#include "attention/paged_attention_launch.cuh"
#include "attention/paged_attention_pieces.cuh"

namespace pykv::attention {

// The shape of clusters whose keys others may share.
template <class Shape>
struct Spanned : Shape {
  static constexpr bool kSpans = true;
};

// Up to so many keys a cluster, whose warps have a tile each of `round` keys, is as quick alone as `spans` of them, of which those
// of all `heads` have half of the device's SMs at least, for these draw the whole bandwidth.  Measured on an H100, in us.
template <class S>
int keys_alone(int spans, int64_t heads, int round, int device) {
  if constexpr (S::kInvariant) return round / S::kTile / 4 * kChunkTokens;  // where each four warps have a chunk
  constexpr float kJoin = 4 + static_cast<float>(S::kColumns * S::kD) / (S::kWarps * 32 * 8);
  constexpr float kRound = (S::kNarrow ? 1.45f : 0.92f) * (S::kColumns <= 8 ? 1.f : S::kColumns == 16 ? 1.3f : 1.8f);
  const float half = static_cast<float>(num_sms(device)) / static_cast<float>(2 * kMostBlocks * heads);
  const float quicker = std::min(static_cast<float>(spans), half);
  return static_cast<int>(static_cast<float>(round) * (kJoin / kRound) * quicker / (quicker - 1));
}

// What the blocks of a KV head that finish the same columns, one in each cluster, leave for each other, each in a slot of its own:
// where a block's columns begin within a query's, another block has the others.
struct PiecesOfSpans {
  const Problem& p;
  int cluster_index, span, spans, rank;

  // Of the k-th cluster's block.
  __device__ int slot(int k) const { return (cluster_index - span + k) * p.cluster + rank; }

  // When all of the block's threads have left theirs: `count` items from `first` on, `quads` of them of a column.  store(item, sum)
  template <class Sum>
  __device__ void join(int quads, int first, int count, auto&& store) const {
    let_next_kernel_start();
    __syncthreads();
    if (threadIdx.x == 0) hand_over_pieces(p, slot(span), -1, p.ticket);
    __syncthreads();
    bool is_last = true;
    for (int k = threadIdx.x; k < spans; k += blockDim.x) is_last = is_last && is_there(p, slot(k), p.ticket);
    if (!__syncthreads_and(is_last)) return;
    // Four lanes have an item, and each of them every fourth piece.
    constexpr int kAtOnce = 4, kLanes = kMostSpans / kAtOnce, kWarpItems = 32 / kLanes;
#pragma unroll 1
    for (int i = threadIdx.x / kLanes; i < (count + kWarpItems - 1) / kWarpItems * kWarpItems;
         i += blockDim.x / kLanes) {
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
    for (int k = threadIdx.x; k < spans; k += blockDim.x) *ticket_place(p, slot(k)) = 0;
  }
};

template <class S>
struct ClusterSpans : DecodeLoader<S> {
  using Base = DecodeLoader<S>;
  using Base::p;
  static constexpr int kQuads = Base::kQuads;

  const int warps = blockDim.x / 32;
  const int rank = p.by_cluster.remainder(blockIdx.x), cluster_index = p.by_cluster.quotient(blockIdx.x);
  const int place = S::kSpans ? p.by_spans.quotient(cluster_index) : cluster_index;
  int used_spans = all_spans();

  __device__ int all_spans() const { return static_cast<int>(p.by_spans.d); }
  __device__ int span() const { return S::kSpans ? p.by_spans.remainder(cluster_index) : 0; }
  __device__ int spans() const { return S::kSpans ? used_spans : 1; }
  __device__ bool is_first() const { return span() == 0; }
  __device__ bool is_left_out() const { return S::kSpans && span() >= used_spans; }

  // Of so many keys.
  __device__ void use_spans(int keys) {
    if (S::kSpans && keys <= p.keys_alone) used_spans = 1;
  }

  // Of the warp's i-th tile the first key.
  __device__ int tile_place(int i) const {
    return (((i * spans() + span()) * warps + this->warp) * p.cluster + rank) * S::kTile;
  }

  // Four columns, the sums of this cluster.  is_first: of those that this block finishes.
  __device__ void leave_piece(int item, bool is_first, const auto& sum) const {
    const int column = item / kQuads, quad = item % kQuads;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * p.rows + column;
    if (quad == 0 || is_first) p.partial_stats[at] = {sum.maximum, sum.sum};
    reinterpret_cast<float4*>(p.partial + at * p.pitch)[quad] = sum.o;
  }

  // When all of the block's threads have left theirs: `count` items from `first` on.  store(item, sum)
  __device__ void join_pieces(int first, int count, auto&& store) const {
    PiecesOfSpans{p, cluster_index, span(), used_spans, rank}.join<Quad>(kQuads, first, count, store);
  }
};

}  // namespace pykv::attention
