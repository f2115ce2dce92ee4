// Where the sums of a block of verify/cluster.cuh go: to the block of its cluster that finishes their rows and,
// where clusters share keys, from there to the last of theirs.
#pragma once

#include "attention/cuda/merge/pieces.cuh"
#include "attention/cuda/verify/kernel.cuh"
#include "attention/cuda/verify/place.cuh"
#include "cuda/cluster.cuh"

namespace pykv::attention {

// A row of a query tile: sums, and what they are relative to.
template <class S>
struct RowSums {
  float4 o[S::kD / 4];
  float maximum, sum, unused[2];  // a pitch by which rows begin in different banks
};

// What the blocks of a cluster send to the one that finishes these rows.
template <class S>
struct alignas(16) RowExchange {
  static constexpr int kPlaces = S::kBlocksOfCluster == 1 ? 1 : S::kGroups * (S::kRows + S::kBlocksOfCluster);
  RowSums<S> rows[kPlaces];  // [block, without this one][group][row]
  uint64_t arrived, room;    // barriers: count bytes, and blocks that have them
};

// Where the sums of a block go: see LinePieces.  First to stages and queries that nobody needs any more, then to the blocks that
// finish their rows.  The query tiles of a sequence are the cluster's segments, one after another.
template <class S>
struct ClusterPieces {
  static constexpr bool kInStages = true;
  const Problem& p;
  RowExchange<S>& exchange;
  RowSums<S>* left;  // [group][row]
  const ClusterPlace<S::kSpans>& at;

  // Those of all groups.
  struct ComputingThreads {
    static __device__ int thread() { return threadIdx.x % kThreads + group() * kThreads; }
    static __device__ int threads() { return S::kGroups * kThreads; }
    static __device__ void sync() { named_barrier_sync(kAllGroupsBarrier, threads()); }
    static __device__ bool all(bool x) { return !named_barrier_any(kAllGroupsBarrier, threads(), !x); }
  };

  // By all that compute.
  static __device__ void open() { sync(); }  // nobody reads stages or queries of the segment

  __device__ void leave_stats(const Unit&, int row, float2 x) const {
    own(row).maximum = x.x;
    own(row).sum = x.y;
  }
  template <class Sums>  // of neighbouring dimensions
  __device__ void leave_sums(int row, int d, Sums x) const {
    *reinterpret_cast<Sums*>(reinterpret_cast<float*>(own(row).o) + d) = x;
  }
  __device__ void leave_sums(const Unit&, int row, int d, float4 x) const { leave_sums(row, d, x); }

  __device__ void end_segment(const Unit& u) const {
    fence_async_proxy();
    sync();
    const int thread = ComputingThreads::thread(), rank = this->rank(), each = p.block_items;
    const bool is_last = (u.query_tile + 1) * p.tile_tokens >= u.query_len;
    if (p.cluster > 1) {
      if (thread < p.cluster * S::kGroups) send(u, thread / S::kGroups, thread % S::kGroups);
      cluster_receive(arrived(), u.query_tile % 2);
      if (is_last) announce(thread);
    }
    const int rows = rows_of(rank, u.query_len, u.query_tile);
    int lanes = 2 * S::kGroups;  // for the parts of a row
    while (lanes < p.cluster * S::kGroups) lanes *= 2;
#pragma unroll 1
    for (int r = 0; r < rows; r += S::kGroups * kThreads / lanes) weigh_parts(u, r + thread / lanes, lanes);
    sync();
    constexpr int kRowLanes = S::kD / 4;  // four dimensions each
#pragma unroll 2
    for (int r = thread / kRowLanes; r < rows; r += S::kGroups * kThreads / kRowLanes) {
      float4 sum{0, 0, 0, 0};
      const auto add = [&](const RowSums<S>* part, int step, int count) {
#pragma unroll 2
        for (int k = 0; k < count; ++k, part += step) {
          const float weight = part->maximum;
          const float4 x = part->o[thread % kRowLanes];
          sum = {fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z),
                 fmaf(weight, x.w, sum.w)};
        }
      };
      add(left + rank * each + r, S::kRows, S::kGroups);
      add(exchange.rows + r, each, (p.cluster - 1) * S::kGroups);
      if (shares_keys()) {
        reinterpret_cast<float4*>(p.partial + piece_row(r) * p.pitch)[thread % kRowLanes] = sum;
      } else {
        store_output<S>(p, row_of(p, u, rank * each + r), thread % kRowLanes * 4, sum);
      }
    }
    if constexpr (S::kSpans) {
      if (shares_keys()) join_pieces(u, rows * kRowLanes);
    }
    if (!is_last) sync();  // all have read
    if (p.cluster == 1) return;
    if (!is_last) {
      if (thread == 0) expect(u.query_len, u.query_tile + 1);
      __syncwarp();
      announce(thread);
    }
    cluster_await(room(), u.query_tile % 2);  // all of this block's sums have arrived
  }

  // By one thread.
  __device__ void expect(int query_len, int query_tile) const {
    const int rows = rows_of(rank(), query_len, query_tile);
    cluster_expect(arrived(), (p.cluster - 1) * S::kGroups * rows * static_cast<int>(sizeof(RowSums<S>)));
  }

 private:
  __device__ uint32_t arrived() const { return shared_address(&exchange.arrived); }
  __device__ uint32_t room() const { return shared_address(&exchange.room); }
  __device__ int rank() const { return p.by_cluster.remainder(blockIdx.x); }
  static __device__ int group() { return computing_group(S::kGroups); }
  static __device__ void sync() { ComputingThreads::sync(); }

  __device__ RowSums<S>& own(int row) const { return left[group() * S::kRows + row]; }

  // With other clusters.
  __device__ bool shares_keys() const { return S::kSpans && at.spans > 1; }

  // Of the rows that this block finishes the r-th, in the workspace.
  __device__ int64_t piece_row(int r) const {
    return static_cast<int64_t>(blockIdx.x) * p.rows + rank() * p.block_items + r;
  }

  // The block has left `items` sums of four columns each.
  __device__ void join_pieces(const Unit& u, int items) const {
    constexpr int kQuads = S::kD / 4;
    const PiecesOfSpans pieces{p, at.cluster, at.span, at.spans, at.rank};
    pieces.join<Quad>(
        kQuads, at.rank * p.block_items * kQuads, items,
        [&](int item, const Quad& sum) {
          const Row row = row_of(p, u, item / kQuads);
          store_output<S>(p, row, item % kQuads * 4, sum.finish(p, row, u.kv_head));
        },
        ComputingThreads());
  }

  // Rows of a query tile that a block finishes.
  __device__ int rows_of(int block, int query_len, int query_tile) const {
    const int tokens = min(p.tile_tokens, query_len - query_tile * p.tile_tokens);
    return max(min(tokens * p.tile_heads - block * p.block_items, p.block_items), 0);
  }

  __device__ void send(const Unit& u, int block, int group) const {
    const int rank = this->rank(), rows = rows_of(block, u.query_len, u.query_tile);
    if (block == rank || rows == 0) return;
    const int other = rank < block ? rank : rank - 1;
    const RowSums<S>* to = exchange.rows + (other * S::kGroups + group) * p.block_items;
    cluster_copy(cluster_address(shared_address(to), block),
                 shared_address(left + group * S::kRows + block * p.block_items),
                 rows * static_cast<int>(sizeof(RowSums<S>)), cluster_address(arrived(), block));
  }

  // To all blocks: this one has what it waited for.
  __device__ void announce(int thread) const {
    if (thread < p.cluster) cluster_arrive(cluster_address(room(), thread));
  }

  // In place of a row's maxima comes what the sums are multiplied by.  Each lane has a part, the first ones this block's.
  __device__ void weigh_parts(const Unit& u, int r, int lanes) const {
    const int k = threadIdx.x % lanes, rank = this->rank();
    const bool exists = k < p.cluster * S::kGroups && r < rows_of(rank, u.query_len, u.query_tile);
    RowSums<S>& part = k < S::kGroups || !exists ? left[exists ? k * S::kRows + rank * p.block_items + r : 0]
                                                 : exchange.rows[(k - S::kGroups) * p.block_items + r];
    float maximum = exists ? part.maximum : -INFINITY, top = maximum;
    for (int m = 1; m < lanes; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    const float weight = power_of_2(maximum - (top == -INFINITY ? 0.f : top));
    float sum = exists ? weight * part.sum : 0.f;
    for (int m = 1; m < lanes; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
    if (!exists) return;
    if (shares_keys()) {
      part.maximum = weight;
      if (k == 0) p.partial_stats[piece_row(r)] = {top, sum};
    } else {
      part.maximum = weight * finish_row(p, row_of(p, u, rank * p.block_items + r), u.kv_head, top, sum);
    }
  }
};

}  // namespace pykv::attention
