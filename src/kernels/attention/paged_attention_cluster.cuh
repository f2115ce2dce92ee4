// Decoding for few sequences: the blocks of a cluster take the tiles of one KV head in turn and add up in each other's
// shared memory.  No second kernel, nothing to find out beforehand: pages are looked up while the length is on its way.
//
// Chain: length, pages and queries at once -> tiles -> sums -> one exchange -> output.
#pragma once

#include <algorithm>

#include "attention/paged_attention_decode_line.cuh"
#include "attention/paged_attention_exact_cluster.cuh"
#include "attention/paged_attention_joint.cuh"
#include "attention/paged_attention_spans.cuh"
#include "cuda/cluster.cuh"
#include "cuda/device.h"

namespace pykv::attention {

// kQueries: 4, 8 or 16, the heads of a group at most; with kTokens, times the tokens of a query tile, and up to 32.
// kWide: more warps, or smaller blocks, of fewer stages. kForAnyBatch: with batch_invariant.
template <class Element, int kD, bool kPackedV, int kQueries, bool kWide, bool kForAnyBatch, bool kTokens = false>
struct ClusterShape : ColumnsShape<Element, kD, kPackedV, kQueries> {
  static constexpr bool kInvariant = kForAnyBatch, kManyTokens = kTokens, kHidesKeys = kTokens, kSpans = false;
  using Few = ColumnsShape<Element, kD, kPackedV, kQueries>;
  static constexpr int kUsualWarps = kD <= 128 ? 8 : 4;
  static constexpr int kWarps = kWide ? 12 : kUsualWarps;                                      // at most
  static constexpr bool kSharedQueries = kTokens && (kQueries == 32 || kQueries * kD > 2048);  // registers have no room
  static constexpr bool kWideBlocks = kWide;
  static constexpr int kStages = Few::kRaw ? (kD == 256 ? 4 : 3) : kWide ? 2 : 3;
  static constexpr int kRingBytes =
      std::max(kStages * Few::kStageBytes, kQueries * kD * 4);  // there a warp leaves its sums
};

struct NoSharedQueries {};

// What the blocks send to the one that finishes these columns, and what the warps of a block share.
template <class S>
struct Exchange : std::conditional_t<S::kSharedQueries, SharedQueries<S>, NoSharedQueries> {
  static constexpr int kItems = S::kColumns * S::kD / 4 + kMostBlocks;  // four columns of a query each
  ColumnStats<S> stats;
  float4 parts[kItems];  // [block][item]
  float2 part_stats[kItems];
  uint64_t barrier;  // counts their bytes
  static constexpr int kItemBytes = sizeof(float4) + sizeof(float2);
};

template <class S>
struct ClusterKernel : ClusterSpans<S> {
  using Base = DecodeLoader<S>;
  using Spans = ClusterSpans<S>;
  using Base::copies;
  using Base::kQuads;
  using Base::lane;
  using Base::p;
  using Base::warp;
  using Spans::place;
  using Spans::rank;
  using Spans::warps;
  using typename Base::PageWords;
  using typename Base::State;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages;
  static constexpr int kAtOnce = Base::kAtOnce;

  char* rings;  // all warps' stages
  Exchange<S>& exchange;
  const int task = S::kManyTokens ? p.by_ways.quotient(place) : place;
  const int sequence = task / p.a.num_kv_heads, kv_head = task - sequence * p.a.num_kv_heads;

  // With kManyTokens: the first key that a query sees, where its tile begins, and the sequence's length.
  int first_seen = 0, begin = 0, seen_len = 0;

  // The warp's i-th tile.
  __device__ int first_token(int i) const {
    const int at = this->tile_place(i);
    if constexpr (!S::kManyTokens) return at;
    return p.sparse ? this->seen_token(kv_head, seen_len, at) : begin + at;
  }

  // What lies past the end of the sequence is no page, but in the table; past the table's end it is -1.
  __device__ int look_up_tiles(int i) const {
    const int token = this->token_to_look_up(i, [this](int tile) { return first_token(tile); });
    return token < p.a.max_seq_len ? this->look_up(sequence, token) : -1;
  }

  // With kByToken: the page of a tile's token, for which nobody waits yet.
  __device__ PageWords ask_for_tile(int i) const {
    const int token = this->token_to_look_up(i, [this](int tile) { return first_token(tile); });
    return this->ask_for_page(sequence, token, token < p.a.max_seq_len);
  }

  __device__ void run() {
    run(true, [] { return true; });
  }

  // has_task: there is such a sequence.  suits(): whether clusters take the call at all; if not, nothing has been written.
  __device__ bool run(bool has_task, auto&& suits) {
    open_exchange();
    if (has_task && blockIdx.x < p.early_blocks) {
      this->foresee(sequence, kv_head, this->early_length(sequence), first_token(0));
    }
    wait_for_previous_kernel();
    const int ids = has_task ? look_up_tiles(0) : -1;  // pages
    const int len = has_task ? this->length(sequence) : 0;
    const bool is_mine = suits();
    this->use_spans(len);
    if (!is_mine || !has_task || this->is_left_out()) {
      close_exchange();
      return is_mine;
    }
    State state;
    this->fetch_queries(sequence, kv_head, state);
    attend_keys(ids, len, state, [&] {
      this->settle(kv_head, state);
      if (p.cluster > 1) cluster_wait();  // all blocks are there; the first tile is still on its way
      if (p.cluster <= 2 || len <= 2048) let_next_kernel_start();
    });
    const int step = this->spans() * p.cluster * warps * kTile;
    this->separate(stage0(), {sequence, len, kv_head}, first_token(0), step, len - 1, state);
    finish(state, len);
    if (rank == 0 && kv_head == 0 && this->is_first() && threadIdx.x == 0)
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

  // With kSharedQueries: what copies need of the lane is found anew for each tile, for no registers are left for it.
  __device__ Base new_loader() const {
    int same_lane = lane;
    asm volatile("" : "+r"(same_lane));
    return {{{{{p, copies, same_lane}}}}};
  }

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
        if constexpr (S::kSharedQueries) {
          part.valid = new_loader().start(stage0 + free * S::kStageBytes, part, ids, next % kAtOnce);
        } else {
          part.valid = Base::start(stage0 + free * S::kStageBytes, part, ids, next % kAtOnce);
        }
        // The pages after the first are those of all spans, but if these are not used.
        if (S::kSpans && !S::kByToken && next == 0 && this->spans() != this->all_spans()) ids = look_up_tiles(0);
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
      // Both are its stage; with kSharedQueries a register counts.
      this->attend(rings + warp * S::kRingBytes, (S::kSharedQueries ? free : at) * S::kStageBytes, part, state);
      __syncwarp();  // its stage is free
      at = after(at);
    }
  }

  // Items to finish, four columns of a query each: of the KV head, and those of this block.
  __device__ int all_items() const { return this->columns() * kQuads; }
  __device__ int own_items() const { return max(min(all_items() - rank * p.block_items, p.block_items), 0); }

  // The warps add up, each block sends its sums to those that finish them, and these add up.
  __device__ void finish(const State& state, int len) const {
    finish(state, 0, [&](int column) { return this->row_of_column(sequence, len, kv_head, column); });
  }

  // row(column): whose results the column has.  parity: of the phase of the barrier.
  __device__ void finish(const State& state, int parity, auto&& row_of) const {
    constexpr bool kInLoops = S::kWideBlocks || S::kColumns > 16;  // the warps may be few of kWarps, or the items many
    constexpr int kRing = S::kRingBytes / 4;
    static_assert(S::kRingBytes >= Base::kLeftBytes);  // the warp's copies have all come and are read
    float* left = reinterpret_cast<float*>(rings);
    this->leave(state, left + warp * kRing, exchange.stats.of[warp]);
    __syncthreads();
    const int items = all_items(), each = p.block_items;
#pragma unroll 1
    for (int x = threadIdx.x; x < items; x += blockDim.x) {
      const int column = x / kQuads, place = sum_place<S::kD>(column, this->tile_dimension(column, x % kQuads * 4));
      const PartSum sum = PartSum::of_parts<S::kWarps, kInLoops>(
          warps, [&](int w) { return exchange.stats.of[w][column]; },
          [&](int w) { return *reinterpret_cast<const float4*>(left + w * kRing + place); });
      if (p.cluster == 1) {  // for this thread
        exchange.parts[x] = sum.o;
        exchange.part_stats[x] = {sum.maximum, sum.sum};
        continue;
      }
      const int to = p.by_block_items.quotient(x), at = rank * each + x - to * each;
      const uint32_t barrier = cluster_address(shared_address(&exchange.barrier), to);
      cluster_send(cluster_address(shared_address(&exchange.parts[at]), to), sum.o, barrier);
      cluster_send(cluster_address(shared_address(&exchange.part_stats[at]), to), float2{sum.maximum, sum.sum},
                   barrier);
    }
    const auto store = [&](int x, const auto& sum) {
      const int column = x / kQuads;
      const Row row = row_of(column);
      if (S::kManyTokens && !row.valid) return;
      const float f = finish_row(p, row, this->kv_head_of(kv_head, column), sum.maximum, sum.sum);
      store_output<S>(p, row, x % kQuads * 4, {sum.o.x * f, sum.o.y * f, sum.o.z * f, sum.o.w * f});
    };
    const int own = own_items();
    if (p.cluster > 1 && own > 0) cluster_receive(shared_address(&exchange.barrier), parity);
#pragma unroll 1
    for (int i = threadIdx.x; i < own; i += blockDim.x) {
      const int x = rank * each + i;
      const PartSum sum = PartSum::of_parts<kMostBlocks, kInLoops>(
          p.cluster, [&](int b) { return exchange.part_stats[b * each + i]; },
          [&](int b) { return exchange.parts[b * each + i]; });
      if (this->spans() > 1) {
        this->leave_piece(x, i == 0, sum);
      } else {
        store(x, sum);
      }
    }
    if constexpr (S::kSpans) {
      if (this->spans() > 1) this->pieces().template join<Quad>(kQuads, rank * each, own, store);
    }
  }
};

template <class S>
constexpr int cluster_shared_bytes(int warps) {
  return warps * S::kRingBytes + static_cast<int>(sizeof(Exchange<S>));
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_cluster_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  ClusterKernel<S> kernel{
      {{{{{{{p, copies}}}}}}}, memory, *reinterpret_cast<Exchange<S>*>(memory + blockDim.x / 32 * S::kRingBytes)};
  kernel.run();
}

template <class S>  // paged_attention_tokens.cuh
__global__ void paged_attention_tokens_kernel(const __grid_constant__ Problem p,
                                              const __grid_constant__ CacheCopies copies);

template <class S>
auto cluster_kernel() {
  if constexpr (S::kInvariant) {
    return &paged_attention_exact_cluster_kernel<S>;
  } else if constexpr (S::kManyTokens) {
    return &paged_attention_tokens_kernel<S>;
  } else {
    return &paged_attention_cluster_kernel<S>;
  }
}

// Shared memory of a block; 0: it does not suffice.
template <class S>
int cluster_bytes(int group, int blocks, int warps, int device) {
  int bytes = cluster_shared_bytes<S>(warps);
  if constexpr (S::kInvariant) {
    const int exchange = exact_exchange_bytes<S>(group, blocks, warps, device);
    bytes = exchange < 0 ? 0 : warps * S::kRingBytes + exact_stats_bytes<S>(warps) + exchange;
  }
  return bytes <= static_cast<int>(shared_memory_limit(device)) ? bytes : 0;
}

// Keys that a query may see, at most, and as many as fill tiles and blocks.
template <class S>
int64_t most_keys(const Problem& p) {
  int64_t most = std::min<int64_t>(p.a.max_seq_len, int64_t{p.window} + S::kTile);
  if (p.lengths == Lengths::kForClusters) most = std::min(most, kMostOfFew);  // where none is much longer than others
  if (!p.sparse) return most;
  return std::min(most, most / p.sparse_stride + (int64_t{p.sparse_local} + 1) * p.sparse_block);
}

// How many blocks take a KV head of a sequence, or a span of its keys, and their warps; no blocks: better leave it to the line.
struct ClusterSize {
  int blocks, warps;
  int spans = 1;
};

// Whether other clusters may share their keys.  Of more columns warpgroups' do, but those over packed caches.
template <class S>
constexpr bool kMaySpan = S::kColumns <= 16 || S::kPackedV;

// How many clusters of so many blocks take a KV head of up to `most` keys, if `room` of them run at once.
template <class S>
int spans_for(int64_t most, int blocks, int64_t room, int64_t heads, int device) {
  const int64_t clusters = std::min<int64_t>(room, num_sms(device) / blocks);
  const int spans = static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans));
  if (spans < kFewestSpans) return 1;
  return most > keys_alone<S>(spans, heads, blocks * S::kWarps * S::kTile, device) ? spans : 1;
}

// One block for each SM, or two of half the size where there are more sequences than that.  Blocks of other sequences
// do not help with a long one, hence the limits (in tokens), for nobody knows the lengths here.  Half of the SMs draw
// the whole bandwidth; fewer blocks than that may lose more than they save, which is some microseconds.
template <class S>
ClusterSize cluster_size(const Problem& p, const Launch& launch) {
  constexpr int64_t kMostOfMany = 2048;
  const int64_t heads = p.a.num_seqs * p.a.num_kv_heads * p.ways;
  const auto kernel = reinterpret_cast<const void*>(cluster_kernel<S>());
  static PerDevice resident[S::kColumns + 1][kMostBlocks + 1];
  const int group = S::kInvariant ? p.group : 0;  // else the room does not depend on it
  const auto room = [&](int blocks) {             // for so many clusters at once
    return resident[group][blocks].get(launch.device, [&] {
      const int bytes = cluster_bytes<S>(group, blocks, S::kWarps, launch.device);
      return bytes == 0 ? 0 : count_resident_clusters(kernel, blocks, S::kWarps * 32, bytes, launch);
    });
  };
  const int64_t most = most_keys<S>(p);
  for (int blocks = kMostBlocks; blocks > 0; --blocks) {
    if (heads > room(blocks)) continue;
    const bool may_span = kMaySpan<S> && blocks == kMostBlocks && p.lengths == Lengths::kAny;
    const int spans = may_span ? spans_for<S>(most, blocks, room(blocks), heads, launch.device) : 1;
    if constexpr (
        S::kRaw) {  // nvfp4 keeps its SMs busy: of long sequences four of half the size are quicker, on all SMs
      constexpr int kHalfBlocks = kMostBlocks / 2;
      const bool may_halve = may_span && spans == 1 && most > 2 * kMostOfFew;
      const int halves = may_halve ? spans_for<S>(most, kHalfBlocks, room(kHalfBlocks), heads, launch.device) : 1;
      if (halves > 1) return {kHalfBlocks, S::kWarps, halves};
    }
    if (p.a.num_seqs > 1 && most > kMostOfFew && spans == 1) return {0, 0};
    constexpr int64_t kMostElements = 1 << 23;  // of a block's keys, times the blocks that are missing
    const int64_t missing = num_sms(launch.device) * 4 / 9 - heads * blocks * spans;
    if (missing > 0 && most / (blocks * spans) * S::kD * missing > kMostElements) return {0, 0};
    return {blocks, S::kWarps, spans};
  }
  if (p.a.num_seqs > 1 && most > kMostOfFew) return {0, 0};
  constexpr int kHalf = S::kInvariant ? 4 : S::kWarps / 2;
  // Of elements that are to be widened, chunks for more than two blocks of an SM are better shared out evenly.
  constexpr bool kByTwo = S::kInvariant && S::kNarrow && S::kD == 128 && !S::kPackedV;
  // A tile for each warp is enough for windows that find room at once, of which the line has nothing else to begin, and for nvfp4,
  // whose line has units of eight tiles.
  const bool is_one_wave = !p.sees_all() && heads <= 2 * num_sms(launch.device);
  const bool suits = most <= kMostOfMany && most >= (is_one_wave || S::kRaw ? 1 : 2) * kHalf * S::kTile &&
                     (!kByTwo || heads <= 2 * num_sms(launch.device)) &&
                     cluster_bytes<S>(group, 1, kHalf, launch.device) > 0;
  return {suits ? 1 : 0, kHalf};
}

// Whether it should be one of the wide shape, S, instead: twelve warps where elements are to be widened and keys are so many
// that 64 SMs are busier with that than with waiting, or where teams of four then take fewer rounds of a chunk each; or blocks
// of three or four warps where there are more than two for each SM: of three if all of them find room at once.
template <class S>
ClusterSize wide_size(const Problem& p, const ClusterSize& usual, const Launch& launch) {
  constexpr int64_t kMany = S::kInvariant ? 4096 : 2048;  // keys of a block
  const int64_t heads = p.a.num_seqs * p.a.num_kv_heads, sms = num_sms(launch.device);
  if (usual.warps == S::kUsualWarps) {
    const auto wide = [&] { return cluster_size<S>(p, launch); };
    if constexpr (S::kInvariant) {
      constexpr int64_t kTeamWarps = ExactClusterKernel<S>::kTeamWarps;  // so many rounds make a long one
      const auto rounds = [&](const ClusterSize& size) {
        const int64_t together =
            std::max<int64_t>(1, size.blocks * size.warps / kTeamWarps) * size.spans * kChunkTokens;
        return (most_keys<S>(p) + together - 1) / together;
      };
      if (rounds(usual) < kTeamWarps && rounds(wide()) < rounds(usual)) return wide();
    }
    return S::kScaled && most_keys<S>(p) > kMany * usual.blocks * usual.spans ? wide() : ClusterSize{0, 0};
  }
  if (usual.blocks == 0 || heads <= 2 * sms) return {0, 0};
  return {1, !S::kInvariant && heads > 3 * sms && heads <= 4 * sms ? 3 : 4};
}

template <class S>
bool launch_cluster_kernel(Problem p, const ClusterSize& size, const Launch& launch) {
  const int64_t clusters = p.a.num_seqs * p.a.num_kv_heads * p.ways * size.spans, blocks = clusters * size.blocks;
  if (blocks == 0 || blocks >= int64_t{1} << 31) return false;
  if constexpr (kMaySpan<S> && !S::kSpans) {
    if (size.spans > 1) return launch_cluster_kernel<Spanned<S>>(p, size, launch);
  }
  const int bytes = cluster_bytes<S>(p.group, size.blocks, size.warps, launch.device);
  if (bytes == 0) return false;
  const auto kernel = cluster_kernel<S>();
  static PerDevice allowed;
  allow_shared_memory(kernel, static_cast<int>(shared_memory_limit(launch.device)), allowed, p.a.op, launch);
  set_cluster(p, size.blocks, S::kManyTokens ? p.tile_tokens * p.tile_heads : p.group, DecodeLoader<S>::kQuads * 4,
              launch.device);
  set_balance(p, 1, launch.device);
  if constexpr (S::kInvariant) {
    p.by_round = Divider(size.blocks * size.warps / ExactClusterKernel<S>::kTeamWarps);
    p.exchange_bytes = exact_exchange_bytes<S>(p.group, size.blocks, size.warps, launch.device);
  }
  if constexpr (S::kSpans) {
    set_spans(p, size.spans, static_cast<int>(clusters), S::kColumns, DecodeLoader<S>::kQuads * 4);
    p.keys_alone = keys_alone<S>(size.spans, clusters / size.spans, size.blocks * size.warps * S::kTile, launch.device);
    if (overlaps_kernels(launch.device)) p.early_blocks = static_cast<unsigned>(blocks);  // the sequence may be short
  }
  launch_after(kernel, dim3(static_cast<unsigned>(blocks)), dim3(size.warps * 32), size.blocks, bytes, launch, p.a.op,
               p, copies_of<S>(p));
  return launch_for_other_lengths(p, launch);
}

}  // namespace pykv::attention
