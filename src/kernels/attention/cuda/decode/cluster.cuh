// Decoding for few sequences over rows of tokens: the blocks of a cluster take the tiles of one KV head in turn and add up in each other's
// shared memory.  No second kernel, nothing to find out beforehand: pages are looked up while the length is on its way.
//
// Chain: length, pages and queries at once -> tiles -> sums -> one exchange -> output.
#pragma once

#include "attention/cuda/decode/loader.cuh"
#include "attention/cuda/decode/spans.cuh"
#include "attention/cuda/launch.cuh"
#include "cuda/cluster.cuh"

namespace pykv::attention {

// Sizes are those of cluster_sizes().  kForAnyBatch: with batch_invariant.  kTokens: queries are of several tokens.
template <class Element, int kD, int kQueries, bool kWide, bool kForAnyBatch, bool kTokens = false>
struct ClusterShape : ColumnsShape<Element, kD, false, kQueries> {
  static constexpr ClusterSizes kSizes = cluster_sizes(kKindOf<Element>, kD, kQueries, kWide, kForAnyBatch, kTokens);
  static constexpr bool kInvariant = kForAnyBatch, kManyTokens = kTokens, kHidesKeys = kTokens, kSpans = false;
  static constexpr int kWarps = kSizes.warps;  // at most
  // For which registers leave room, at least.
  static constexpr int kBlocksOfSm = kD <= 64 && kQueries <= 8 && !kWide ? 2 : 1;
  static constexpr int kStages = kSizes.stages, kRingBytes = kSizes.ring_bytes();  // there a warp leaves its sums
};

// The same for one query token that sees keys through a window.
template <class Cluster>
struct Windowed : Cluster {
  static constexpr bool kHidesKeys = true;
};

// What the blocks send to the one that finishes these columns, and what the warps of a block share.
template <class S>
struct Exchange {
  static constexpr int kItems = S::kColumns * S::kD / 4 + kMostBlocks;  // four columns of a query each
  ColumnStats<S> stats;
  float4 parts[kItems];  // [block][item]
  float2 part_stats[kItems];
  uint64_t barrier;  // counts their bytes
  static constexpr int kItemBytes = sizeof(float4) + sizeof(float2);
};

template <class S>
struct ClusterKernel {
  using Results = ColumnResults<S>;
  using State = typename ColumnQueries<S>::State;
  using FirstLoads = typename DecodePages<S>::FirstLoads;
  using PageWords = typename DecodePages<S>::PageWords;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages;
  static constexpr int kAtOnce = DecodePages<S>::kAtOnce, kQuads = Results::kQuads;

  const Problem& p;
  const CacheCopies& copies;
  char* rings;  // all warps' stages
  Exchange<S>& exchange;
  DecodeLoader<S> loader{p, copies};
  ColumnQueries<S> queries{p};
  Results results{p};
  ClusterSpans<S> block{p};
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();
  const int task = S::kManyTokens ? p.by_ways.quotient(block.place) : block.place;
  const int sequence = task / p.a.num_kv_heads, kv_head = task - sequence * p.a.num_kv_heads;

  // With kHidesKeys: the first key that a query sees, and where its tile begins.
  int first_seen = 0, begin = 0;

  // The warp's i-th tile.
  __device__ int first_token(int i) const { return (S::kHidesKeys ? begin : 0) + block.tile_place(i); }

  // What lies past the end of the sequence is no page, but in the table; past the table's end it is -1.
  __device__ int look_up_tiles(int i) const {
    const int token = loader.table.token_to_look_up(i, [this](int tile) { return first_token(tile); });
    return token < p.a.max_seq_len ? loader.table.look_up(sequence, token) : -1;
  }

  // With kByToken: the page of a tile's token, for which nobody waits yet.
  __device__ PageWords ask_for_tile(int i) const {
    const int token = loader.table.token_to_look_up(i, [this](int tile) { return first_token(tile); });
    return loader.table.ask_for_page(sequence, token, token < p.a.max_seq_len);
  }

  // From the first key that a query at this position sees.
  __device__ void look_from(int position) {
    first_seen = max(0, attention::first_seen(p, position));
    begin = first_seen & -kTile;
  }

  __device__ void look_at(int len) { look_from(len - 1); }

  // Of the first tiles.
  __device__ FirstLoads find_first_loads(bool has_task) const {
    const int token = loader.table.token_to_look_up(0, [this](int tile) { return first_token(tile); });
    return loader.table.find_first_loads(sequence, token, has_task && token < p.a.max_seq_len);
  }

  __device__ void run() {
    run(true, [] { return true; });
  }

  // has_task: there is such a sequence.  suits(): whether clusters take the call at all; if not, nothing has been written.
  __device__ bool run(bool has_task, auto&& suits) {
    // What can be found out before the kernel before has ended, is, so that loads come right after it.
    open_exchange();
    auto places = queries.find_queries(sequence, kv_head);
    queries.have_queries_ready(places);
    FirstLoads first{};
    if constexpr (!S::kHidesKeys) first = find_first_loads(has_task);
    if (has_task && blockIdx.x < p.early_blocks) {
      const int len = loader.table.early_length(sequence);
      if constexpr (S::kHidesKeys) look_at(static_cast<int>(clamp(len, 0, p.a.max_seq_len)));
      loader.table.foresee(sequence, kv_head, len, first_token(0));
    }
    [[maybe_unused]] const int guessed_begin = begin;  // which with a window depends on the length
    if constexpr (S::kHidesKeys) first = find_first_loads(has_task);
    wait_for_previous_kernel();
    const PageWords pages = loader.table.ask_for_pages(first);  // of the first keys if all is as it was a moment before
    const int len = has_task ? loader.table.length(first) : 0;
    const bool is_mine = suits();
    block.use_spans(len);
    if (!is_mine || !has_task || block.is_left_out()) {
      close_exchange();
      return is_mine;
    }
    State state;
    queries.fetch_queries(places, state);
    int ids = pages.id();
    if constexpr (S::kHidesKeys) {
      look_at(len);
      if (begin != guessed_begin) ids = look_up_tiles(0);
    }
    attend_keys(ids, len, state, [&] {
      queries.settle(kv_head, state);
      if (p.cluster > 1) cluster_wait();  // all blocks are there; the first tile is still on its way
      if (p.cluster <= 2 || len <= 2048) let_next_kernel_start();
    });
    const int step = block.spans() * p.cluster * block.warps * kTile;
    loader.separate(stage0(), {sequence, len, kv_head}, first_token(0), step, len - 1, state);
    finish(state, len);
    if (block.rank == 0 && kv_head == 0 && block.is_first() && threadIdx.x == 0)
      report_sequence(p, load_sequence(p, sequence));
    return true;
  }

  // If nobody sends anything.
  __device__ void close_exchange() const {
    if (p.cluster == 1) return;
    cluster_wait();
    if (threadIdx.x == 0) cluster_close(shared_address(&exchange.barrier));
    __syncthreads();
  }

  __device__ void open_exchange() const {
    if (p.cluster == 1) return;
    if (threadIdx.x == 0) {
      cluster_open(shared_address(&exchange.barrier));
      expect_sums();
    }
    cluster_announce();  // others may send
  }

  __device__ void expect_sums() const {
    cluster_expect(shared_address(&exchange.barrier), own_items() * p.cluster * Exchange<S>::kItemBytes);
  }

  __device__ uint32_t stage0() const { return shared_address(rings + warp * S::kRingBytes); }

  // The keys before `end`, whose first pages are `ids`.  meanwhile(): what is done once the first tiles are on their way.
  __device__ void attend_keys(int ids, int end, State& state, auto&& meanwhile) const {
    // In iteration i the copies of tile i + stages - 1 start.  One body for all iterations: fetching instructions counts.
    const uint32_t stage0 = this->stage0();
    int later_ids = -1;
    [[maybe_unused]] PageWords words[2];  // with kByToken: of the tiles after the one that starts next
    if constexpr (S::kByToken) {
      for (int k = 0; k < 2; ++k) words[k] = ask_for_tile(k + 1);
    }
    uint32_t valid[kStages];  // of tiles i to i + stages - 1
    int at = 0, free = 0;     // the stages of the first and the last of these
    const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      const int next = i + kStages - 1;
      TilePart part{sequence, end, kv_head, first_token(next), first_seen, 0, 0, true, false, false};
      if (part.first_token < end) {
        if constexpr (S::kByToken) {
          if (next > 0) {
            ids = words[0].id();
            words[0] = words[1];
            words[1] = ask_for_tile(next + 2);
          }
        } else {
          if (next % kAtOnce == 0 && next > 0) ids = later_ids;
          if (next % kAtOnce == kAtOnce - 1) later_ids = look_up_tiles(next + 1);
        }
        part.valid = loader.start(stage0 + free * S::kStageBytes, part, ids, next % kAtOnce);
        // The pages after the first are those of all spans, but if these are not used.
        if (S::kSpans && next == 0 && block.spans() != block.all_spans()) ids = look_up_tiles(0);
      }
      cp_async_commit();
      free = after(free);
#pragma unroll
      for (int k = 0; k + 1 < kStages; ++k) valid[k] = valid[k + 1];
      valid[kStages - 1] = part.valid;
      if (i < 0) continue;
      if (i == 0) meanwhile();
      part.first_token = first_token(i);
      if (part.first_token >= end) break;
      part.valid = valid[0];
      cp_async_wait<kStages - 1>();
      __syncwarp();  // the tile is there
      loader.attend(rings + warp * S::kRingBytes, at * S::kStageBytes, part, state);
      __syncwarp();  // its stage is free
      at = after(at);
    }
  }

  // Items to finish, four columns of a query each: of the KV head, and those of this block.
  __device__ int all_items() const { return queries.columns() * kQuads; }
  __device__ int own_items() const { return max(min(all_items() - block.rank * p.block_items, p.block_items), 0); }

  // The warps add up, each block sends its sums to those that finish them, and these add up.
  __device__ void finish(const State& state, int len) const {
    finish(state, 0, [&](int column) { return results.row_of_column(sequence, len, kv_head, column); });
  }

  // row(column): whose results the column has.  parity: of the phase of the barrier.
  __device__ void finish(const State& state, int parity, auto&& row_of) const {
    constexpr int kRing = S::kRingBytes / 4;
    static_assert(S::kRingBytes >= Results::kLeftBytes);  // the warp's copies have all come and are read
    float* left = reinterpret_cast<float*>(rings);
    results.leave(state, left + warp * kRing, exchange.stats.of[warp]);
    __syncthreads();
    const int items = all_items(), each = p.block_items;
#pragma unroll 1
    for (int x = threadIdx.x; x < items; x += blockDim.x) {
      const int column = x / kQuads, place = sum_place<S::kD>(column, results.tile_dimension(column, x % kQuads * 4));
      const PartSum sum = PartSum::of_parts<S::kWarps>(
          block.warps, [&](int w) { return exchange.stats.of[w][column]; },
          [&](int w) { return *reinterpret_cast<const float4*>(left + w * kRing + place); });
      if (p.cluster == 1) {  // for this thread
        exchange.parts[x] = sum.o;
        exchange.part_stats[x] = {sum.maximum, sum.sum};
        continue;
      }
      const int to = p.by_block_items.quotient(x), at = block.rank * each + x - to * each;
      const uint32_t barrier = cluster_address(shared_address(&exchange.barrier), to);
      cluster_send(cluster_address(shared_address(&exchange.parts[at]), to), sum.o, barrier);
      cluster_send(cluster_address(shared_address(&exchange.part_stats[at]), to), float2{sum.maximum, sum.sum},
                   barrier);
    }
    const auto store = [&](int x, const auto& sum) {
      const int column = x / kQuads;
      const Row row = row_of(column);
      if (S::kManyTokens && !row.valid) return;
      const float f = finish_row(p, row, queries.kv_head_of(kv_head, column), sum.maximum, sum.sum);
      store_output<S>(p, row, x % kQuads * 4, {sum.o.x * f, sum.o.y * f, sum.o.z * f, sum.o.w * f});
    };
    const int own = own_items();
    if (p.cluster > 1 && own > 0) cluster_receive(shared_address(&exchange.barrier), parity);
#pragma unroll 1
    for (int i = threadIdx.x; i < own; i += blockDim.x) {
      const int x = block.rank * each + i;
      const PartSum sum = PartSum::of_parts<kMostBlocks>(
          p.cluster, [&](int b) { return exchange.part_stats[b * each + i]; },
          [&](int b) { return exchange.parts[b * each + i]; });
      if (block.spans() > 1) {
        block.leave_piece(x, i == 0, sum);
      } else {
        store(x, sum);
      }
    }
    if constexpr (S::kSpans) {
      if (block.spans() > 1) block.pieces().template join<Quad>(kQuads, block.rank * each, own, store);
    }
  }
};

template <class S>
constexpr int cluster_shared_bytes(int warps) {
  return warps * S::kRingBytes + static_cast<int>(sizeof(Exchange<S>));
}

template <class S>
struct ClusterBlock {
  static constexpr int kThreadsOfBlock = S::kWarps * 32, kBlocksOfSm = S::kBlocksOfSm;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    auto& exchange = *reinterpret_cast<Exchange<S>*>(memory + blockDim.x / 32 * S::kRingBytes);
    ClusterKernel<S> kernel{p, copies, memory, exchange};
    kernel.run();
  }
};

// Does a kernel of these clusters have an instance that shares keys?
template <class S>
constexpr bool kMaySpan =
    S::kSizes.may_span() && S::kHidesKeys == S::kManyTokens && !S::kSpans && !S::kByToken && !S::kFolded;

template <class S>
void launch_clusters(const Problem& p, const Step& s, const Launch& launch) {
  static_assert(cluster_shared_bytes<S>(S::kWarps) == S::kSizes.shared_bytes(S::kWarps));
  if constexpr (kMaySpan<S>) {
    if (s.spans > 1) return launch_clusters<Spanned<S>>(p, s, launch);
  }
  const int most_bytes = device_info(launch.device).shared_of_block;
  launch_step<paged_attention_kernel<ClusterBlock<S>>>(p, s, most_bytes, launch, copies_of<S>(p));
}

}  // namespace pykv::attention
