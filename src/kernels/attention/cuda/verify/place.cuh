// Which keys of which sequence a block of verify/cluster.cuh has, and its way along them.
#pragma once

#include "attention/cuda/schedule/line.cuh"

namespace pykv::attention {

constexpr int kMostClusterStages = 4;

// Where a block works.  kSpans: clusters may share the keys of a head.
template <bool kSpans>
struct ClusterPlace {
  int cluster, sequence, kv_head, rank;
  int span = 0, spans = 1;  // which of so many clusters
  Sequence seq;

  // seq_of(sequence): its length and queries.
  __device__ ClusterPlace(const Problem& p, auto&& seq_of) {
    cluster = p.by_cluster.quotient(blockIdx.x);
    rank = blockIdx.x - cluster * p.cluster;
    int task = cluster;
    if constexpr (kSpans) {
      task = p.by_spans.quotient(cluster);
      span = cluster - task * static_cast<int>(p.by_spans.d);
    }
    sequence = p.by_heads.quotient(task);
    kv_head = task - sequence * p.a.num_kv_heads;
    seq = seq_of(sequence);
    // Only one tile's piece has a place.
    if (kSpans && seq.len > p.keys_alone && seq.query_len <= p.tile_tokens) spans = static_cast<int>(p.by_spans.d);
  }

  __device__ bool is_left_out() const { return span >= spans; }

  // The first query tile, without keys.
  __device__ Unit unit() const { return first_unit(sequence, seq, kv_head); }

  // What a block has of the keys that a query tile sees.
  struct Keys {
    int first_token, tiles;
  };
  __device__ Keys keys(const Problem& p, const Extent& extent, int query_tile) const {
    int first = extent.first_key(query_tile) & -p.kv_tile;
    int all = max(1, (extent.last_key(query_tile) - first + p.kv_tile) >> (31 - __clz(p.kv_tile)));
    if (kSpans && spans > 1) {
      const int each = p.by_spans.quotient(all), longer = all - each * spans;
      first += (span * each + min(span, longer)) * p.kv_tile;
      all = each + (span < longer);
    }
    const int each = p.by_cluster.quotient(all), longer = all - each * p.cluster;
    return {first + (rank * each + min(rank, longer)) * p.kv_tile, each + (rank < longer)};
  }
};

// Goes along a block's parts of the segments of its cluster.  It lies in shared memory, and one thread at a time moves it.
template <bool kSpans>
struct ClusterWalker {
  Unit unit;       // the next one
  int in_segment;  // units of this block in its segment, from `unit` on
  ClusterPlace<kSpans> at;
  Extent extent;

  __device__ void start(const Problem& p, const ClusterPlace<kSpans>& place, LineEnds*) {
    at = place;
    extent = Extent(p, at.seq);
    unit = at.unit();
    unit.exists = takes(p, at.seq);
    if (unit.exists) enter_segment(p);
  }

  __device__ void next(const Problem& p) {
    if (--in_segment == 0) return next_segment(p);
    unit.first_token += p.kv_tile;
    unit.begins = false;
  }

  __device__ void next_segment(const Problem& p) {
    unit.exists = ++unit.query_tile < extent.num_tiles;
    if (unit.exists) enter_segment(p);
  }

 private:
  __device__ void enter_segment(const Problem& p) {
    const auto [first_token, tiles] = at.keys(p, extent, unit.query_tile);
    unit.first_token = first_token;
    unit.first_key = extent.first_key(unit.query_tile);
    unit.last_key = min(extent.last_key(unit.query_tile), first_token + tiles * p.kv_tile - 1);
    unit.begins = true;
    // Each group leaves sums, if only those of no key, and all stages are the segment's in the end.
    in_segment = max(tiles, kMostClusterStages);
  }
};

}  // namespace pykv::attention
