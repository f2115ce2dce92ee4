// Short calls with 17 to 64 query rows on Hopper, where caches are rows of tokens: a cluster of blocks takes one KV head of a
// sequence, each block a part of the keys, in the way of paged_attention_warpgroup.cuh, and each finishes some of the rows.
// There is no place to find on a line, and no second kernel.  Clusters beside each other may share the keys of few KV heads
// (paged_attention_spans.cuh): each has a stretch of them here.
//
// A block has an SM for itself, and in it two groups of four warps compute, for a tile each: of clusters of twice as many blocks
// with one group a quarter would find no room.  Where there are more KV heads than SMs, two such blocks without a cluster do.
//
// Sums travel by copies from shared memory to that of the block that finishes their row, whose barrier counts them as they
// arrive: stores of 16 bytes (`st.async`) arrive at 8 bytes a cycle.
//
// Chain: lengths -> pages -> tiles -> one exchange -> output, for each query tile of the sequence, of which there is mostly one.
//
// Bottleneck: what is executed once, at the start and at the end, for its instructions come from the L2: 10 us with 32 rows, of
// which the floor has 4; and with 64 rows over elements of one byte one step after the other.  See
// docs/kernels/paged_attention.md.
#pragma once

#include "attention/paged_attention_span_pieces.cuh"
#include "attention/paged_attention_warpgroup_codes.cuh"
#include "attention/paged_attention_warpgroup_columns.cuh"
#include "cuda/cluster.cuh"

namespace pykv::attention {

constexpr int kMostClusterStages = 4;

// kAlone: without a cluster, and with one group.
template <class Shape, bool kAlone>
struct WarpgroupClusterShape : Shape {
  static constexpr bool kSpans = false;
  static constexpr int kBlocksOfCluster = kAlone ? 1 : kMostBlocks;  // at most
  static constexpr int kGroups = kAlone ? 1 : 2, kBlock = (kGroups + 1) * kThreads, kBlocksPerSm = kAlone ? 2 : 1;
  static constexpr int kComputeRegisters = kAlone ? Shape::kComputeRegisters : 200;
  static constexpr int kCopyRegisters = kAlone ? Shape::kCopyRegisters : 96;
  static constexpr int kStages = kAlone && Shape::kD == 128 ? 2 : kMostClusterStages;
  static constexpr int kRingBytes = kStages * Shape::kStageBytes;
  static_assert(kStages % kGroups == 0);  // so that a group waits at the barriers of its own stages, each time
};

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

  __device__ void start(const Problem& p, const ClusterPlace<kSpans>& place) {
    at = place;
    extent = Extent(p, at.seq);
    unit = at.unit();
    unit.exists = takes(p, at.seq);
    if (unit.exists) enter_segment(p);
  }

  static __device__ void note_first(const Problem&) {}  // nobody else combines anything

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
    static __device__ bool all(bool x) { return named_barrier_and(kAllGroupsBarrier, threads(), x); }
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
      if (at.spans > 1) join_pieces(u, rows * kRowLanes);
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

template <class S, class Softmax>
struct WarpgroupClusterKernel : WarpgroupKernel<S, Softmax, ClusterWalker<S::kSpans>> {
  using Base = WarpgroupKernel<S, Softmax, ClusterWalker<S::kSpans>>;
  using Place = ClusterPlace<S::kSpans>;
  using Pieces = ClusterPieces<S>;
  using Base::copies;
  using Base::lane;
  using Base::p;

  RowExchange<S>& exchange;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ void run() {
    const bool is_first = threadIdx.x == 0;
    if (is_first) {
      this->open_barriers();
      if (p.cluster > 1) {
        mbarrier_init(shared_address(&exchange.room), p.cluster);
        cluster_open(shared_address(&exchange.arrived));
      }
    }
    if (p.cluster > 1) cluster_announce();  // others may send
    if (blockIdx.x < p.early_blocks && this->brings_tiles()) foresee();
    wait_for_previous_kernel();
    RawSequence raw;
    const Place at(p, [&](int sequence) {
      raw = load_sequence(p, sequence);
      return clamp_sequence(p, raw);
    });
    if (!takes_call(p) || at.is_left_out()) {
      if (p.cluster > 1) cluster_wait();
      return;
    }
    const Pieces pieces{p, exchange, reinterpret_cast<RowSums<S>*>(this->ring), at};
    if (is_first) {
      if (p.cluster > 1 && takes(p, at.seq)) pieces.expect(at.seq.query_len, 0);
      if (at.rank == 0 && at.kv_head == 0 && at.span == 0) report_sequence(p, raw);
    }
    if (!this->brings_tiles())
      this->prefetch_rows(at.unit(), Pieces::ComputingThreads::thread(), S::kGroups * kThreads);
    __syncthreads();  // the barriers are open
    if (this->brings_tiles()) {
      give_registers<S::kCopyRegisters>();
      this->bring_tiles(at);
      let_next_kernel_start();
      if (p.cluster > 1) cluster_wait();
    } else {
      take_registers<S::kComputeRegisters>();
      if (p.cluster > 1) cluster_wait();
      this->compute_tiles(pieces);
    }
  }

  // While the kernel before still runs, the copying warps bring their first tokens into the L2, if lengths are what they are now.
  __device__ void foresee() const {
    const Place at(p, [&](int sequence) {
      const int len = __ldcg(words_at(p.a.seq_lens, sequence));
      return Sequence{static_cast<int>(clamp(len, 0, p.a.max_seq_len)), 0, p.tile_tokens};
    });
    const int token = at.keys(p, Extent(p, at.seq), 0).first_token + this->member / 2;
    if (token >= at.seq.len || at.is_left_out()) return;
    const auto [words, step] = place_in_table(p, at.sequence, token);
    const int id = __ldcg(words);
    if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(p.a.num_blocks)) return;
    const char* row = lane % 2 ? this->value_row(id, token, at.kv_head) : this->key_row(id, token, at.kv_head);
    for (int i = 0; i < copies.head_bytes; i += 128) prefetch(row + i);
  }
#endif
};

template <class S, class Softmax>
struct WarpgroupClusterMemory : WarpgroupMemory<S, Softmax, ClusterWalker<S::kSpans>> {
  using Base = WarpgroupMemory<S, Softmax, ClusterWalker<S::kSpans>>;
  static_assert(S::kGroups * S::kRows * static_cast<int>(sizeof(RowSums<S>)) <= Base::kBytesBefore);
  RowExchange<S> exchange;
};

template <class S, class Softmax>
__global__ void __launch_bounds__(S::kBlock, S::kBlocksPerSm)
    paged_attention_warpgroup_cluster_kernel(const __grid_constant__ Problem p,
                                             const __grid_constant__ CacheCopies copies) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  using Memory = WarpgroupClusterMemory<S, Softmax>;
  auto& shared = *reinterpret_cast<Memory*>(memory + Memory::kBytesBefore);
  WarpgroupClusterKernel<S, Softmax>{shared.kernel(p, copies, memory), shared.exchange}.run();
#endif
}

// False if there are more KV heads than find room at once or, where they are to share keys, too many for that.
template <class S, class Softmax>
bool launch_warpgroup_cluster(const Problem& given, const Launch& launch) {
  constexpr int kBytes = warpgroup_shared_bytes<S, WarpgroupClusterMemory<S, Softmax>>();
  const auto kernel = paged_attention_warpgroup_cluster_kernel<S, Softmax>;
  static PerDevice resident[S::kBlocksOfCluster + 1];
  const int64_t heads = given.a.num_seqs * given.a.num_kv_heads;
  for (int blocks = S::kBlocksOfCluster; blocks > 0; --blocks) {
    const int clusters = resident[blocks].get(launch.device, [&] {
      return count_resident_clusters(reinterpret_cast<const void*>(kernel), blocks, S::kBlock, kBytes, launch);
    });
    if (heads > clusters) continue;
    const int spans = S::kSpans ? static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans)) : 1;
    if (S::kSpans && (blocks < kMostBlocks || spans < kFewestSpans)) return false;
    Problem p = given;
    p.by_heads = Divider(p.a.num_kv_heads);
    set_rows(p, S::kRows);
    set_places(p, S::kUnitTokens);
    set_cluster(p, blocks, p.tile_tokens * p.tile_heads, 4, launch.device);  // a block finishes whole rows
    set_balance(p, S::kBlocksPerSm, launch.device);
    const auto grid = static_cast<unsigned>(heads * spans * blocks);
    if constexpr (S::kSpans) {
      constexpr float kAlone = 4608;  // keys, as quickly by one cluster as by very many; measured on an H100
      set_spans(p, spans, static_cast<int>(heads) * spans, S::kRows, S::kD);
      p.keys_alone = static_cast<int>(kAlone * static_cast<float>(spans) / static_cast<float>(spans - 1));
      p.early_blocks = grid;  // the sequence may be short
    }
    launch_after(kernel, dim3(grid), dim3(S::kBlock), blocks, kBytes, launch, p.a.op, p, copies_of<S>(p));
    return launch_for_other_lengths(p, launch);
  }
  return false;
}

// False if the call had better go another way.
template <class Shape, template <class> class Softmax>
bool launch_short_call(const Problem& p, const Launch& launch) {
  using Clusters = WarpgroupClusterShape<Shape, false>;
  using Alone = WarpgroupClusterShape<Shape, true>;
  if (suits_spans(p, 1, launch.device)) {
    using Sharing = Spanned<Clusters>;
    return launch_warpgroup_cluster<Sharing, Softmax<Sharing>>(p, launch);
  }
  // Of 64 rows few heads are quicker by clusters beside each other, with half of the rows each; and many over elements of one byte
  // by the line, unless keys are few.
  constexpr bool kMany = Shape::kRows > 32;
  constexpr int64_t kFewKeys = 2048;
  const int64_t few_heads = num_sms(launch.device) / (Shape::kNarrow ? 3 : 8);
  if (kMany && p.a.num_seqs * p.a.num_kv_heads < few_heads) return false;
  const bool suits_alone = !kMany || !Shape::kNarrow || p.a.max_seq_len <= kFewKeys;
  return launch_warpgroup_cluster<Clusters, Softmax<Clusters>>(p, launch) ||
         (suits_alone && launch_warpgroup_cluster<Alone, Softmax<Alone>>(p, launch));
}

// Do all sequences, as far as the host can tell, have so many tokens that a tile has `rows` of them, and short keys, unless it is
// the device that tells or clusters share them?  One that had far more would keep its cluster busy when the others had finished.
inline bool suits_warpgroup_clusters(const Problem& p, int rows, int device) {
  const int64_t tokens = p.a.num_tokens / p.a.num_seqs;
  const bool is_short = std::min<int64_t>(p.a.max_seq_len, int64_t{p.window} + tokens) <= kMostOfFew;
  return p.a.num_tokens % p.a.num_seqs == 0 && tokens * p.group <= rows && p.min_rows == 0 &&
         (is_short || p.lengths == Lengths::kForClusters || suits_spans(p, 1, device));
}

// launch_rows.operator()<kD, kRows>()
bool launch_clusters_for_rows(const Problem& p, int device, auto&& launch_rows) {
  bool done = false;
  dispatch_bool(p.a.head_size <= 64, [&]<bool kSmall> {
    constexpr int kD = kSmall ? 64 : 128;
    if (suits_warpgroup_clusters(p, 32, device)) {
      done = launch_rows.template operator()<kD, 32>();
    } else if (suits_warpgroup_clusters(p, 64, device)) {
      done = launch_rows.template operator()<kD, 64>();
    }
  });
  return done;
}

template <class Element>
bool launch_clusters_of_rows(const Problem& p, const Launch& launch) {
  return launch_clusters_for_rows(p, launch.device, [&]<int kD, int kRows> {
    if constexpr (kRows == 64) {
      return launch_short_call<WarpgroupShape<Element, kD>, WarpgroupRows>(p, launch);
    } else {
      return launch_short_call<WarpgroupColumnsShape<Element, kD, kRows>, WarpgroupColumns>(p, launch);
    }
  });
}

template <KvFormat kFormat>
bool launch_clusters_of_codes(const Problem& p, const Launch& launch) {
  return launch_clusters_for_rows(p, launch.device, [&]<int kD, int kRows> {
    return launch_short_call<WarpgroupCodesShape<kFormat, kD, kRows>, WarpgroupCodes>(p, launch);
  });
}

}  // namespace pykv::attention
