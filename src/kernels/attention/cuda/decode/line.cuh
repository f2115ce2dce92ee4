// Decoding proper: one query token for each sequence, which sees all its keys or those of a window, at
// most 16 query heads for a KV head, and pages of a multiple of eight tokens (others: decode/shape.cuh).  With
// kManyTokens, of caches of one byte: several tokens, which are at most 16 queries with their heads.
//
// What generic/mma.cuh does for any batch, in the fewest steps from the start of the kernel to the first copy: a
// warp finds its place from the lengths by itself, walks on in registers, and starts the copies of a tile before it works
// on the one before.  There is no second kernel: of the blocks that share a segment, the last adds up.
//
// Floor: KV bytes / bandwidth + the chain length -> page -> tile.
#pragma once

#include "attention/cuda/decode/invariant_team.cuh"
#include "attention/cuda/decode/loader.cuh"
#include "attention/cuda/decode/walk.cuh"
#include "attention/cuda/launch.cuh"
#include "cuda/mbarrier.cuh"

namespace pykv::attention {

template <class S>
struct DecodeKernel {
  using Results = ColumnResults<S>;
  using Line = DecodeWalk<S>;
  using State = typename ColumnQueries<S>::State;
  using Walk = typename Line::Walk;
  using PageWords = typename DecodePages<S>::PageWords;
  using Part = PartOf<S>;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages, kHeads = S::kHeads, kQuads = Results::kQuads;
  static constexpr int kLead = Line::kLead, kPlaceUnits = Line::kPlaceUnits, kUnitTokens = Line::kUnitTokens;

  const Problem& p;
  const CacheCopies& copies;
  LineShare& share;
  Part* parts;  // the warp's
  char* rings;  // all warps' stages
  ColumnStats<S>& stats;

  DecodeLoader<S> loader{p, copies};
  ColumnQueries<S> queries{p};
  Results results{p};
  Line line{p, {p, copies}, share};
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  // ---- the loop -----------------------------------------------------------------------------------------------------

  // Of this warp's tile in a unit of the segment.
  __device__ int first_token(const Walk& w, int unit) const {
    if constexpr (S::kInvariant) {
      static_assert(kPlaceUnits * kTile == kPartTokens);
      return unit / kPlaceUnits * kChunkTokens + warp * kPartTokens + unit % kPlaceUnits * kTile;
    }
    return (w.skipped + unit) * kUnitTokens + warp / kHeads * kTile;
  }

  // For this tile and the next ones of the segment; with kByToken for this one, and the warp does not wait for it.
  using Ids = std::conditional_t<S::kByToken, PageWords, int>;
  __device__ Ids look_up_tiles(const Walk& w) const {
    const int token = loader.table.token_to_look_up(w.tile, [&](int tile) { return first_token(w, tile); });
    if constexpr (S::kByToken) {
      return loader.table.ask_for_page(w.sequence, token, token < w.len);
    } else {
      return token < w.len ? loader.table.look_up(w.sequence, token) : -1;
    }
  }
  static __device__ int ids_of(int ids) { return ids; }
  static __device__ int ids_of(const PageWords& words) { return words.id(); }

  // Whose queries and results column `column` has.
  __device__ Row row_of_part(const Part& part, int kv_head, int column) const {
    if constexpr (S::kManyTokens) {
      return row_of(p, unit_of(part.sequence, part.len, part.query_begin, part.query_len, kv_head, part.query_tile),
                    column);
    } else {
      return results.row_of_column(part.sequence, part.len, kv_head, column);
    }
  }

  // Of several tokens.
  static __device__ Unit unit_of(int sequence, int len, int query_begin, int query_len, int kv_head, int query_tile) {
    Unit u{};
    u.sequence = sequence;
    u.sequence_len = len;
    u.query_begin = query_begin;
    u.query_len = query_len;
    u.kv_head = kv_head;
    u.query_tile = query_tile;
    return u;
  }

  // Starts the way of the queries from memory, so that the beginning of a segment finds them near.
  __device__ void prefetch_queries(const Part& part) const {
    constexpr int kLines = S::kFolded || kD <= 64 ? 1 : kD / 64;  // of 128 bytes
    const int column = lane / kLines;
    if (lane < S::kColumns * kLines && column < queries.columns() && lane % kLines * 64 < p.a.head_size) {
      const Row row = row_of_part(part, part.kv_head, column);
      if (!S::kManyTokens || row.valid) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(query_row(p, row) + lane % kLines * 64));
      }
    }
  }

  __device__ void fetch(const Part& part, State& state) const {
    if constexpr (S::kManyTokens) {
      queries.fetch_queries(
          unit_of(part.sequence, part.len, part.query_begin, part.query_len, part.kv_head, part.query_tile), state);
    } else {
      queries.fetch_queries(part.sequence, part.kv_head, state);
    }
  }

  // Of a piece's rows, those of each KV head of the segment.
  __device__ int head_of(int row) const {
    int head = 0;
#pragma unroll
    for (int i = 1; i < kHeads; ++i) head += row >= i * queries.columns();
    return head;
  }

  // The warps add up through the stages that they are done with.
  __device__ void end_segment(const Part& part, const State& state, int stage_offset) const {
    static_assert(S::kStageBytes >= Results::kLeftBytes);
    float* left = reinterpret_cast<float*>(rings + stage_offset);
    constexpr int kRing = S::kRingBytes / 4;
    __syncwarp();  // all lanes have read what lay there
    results.leave(state, left + warp * kRing, stats.of[warp]);
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < kHeads * queries.columns() * kQuads; x += S::kWarps * 32) {
      const int row_of_piece = x / kQuads, d = x % kQuads * 4;
      const int head = head_of(row_of_piece), column = row_of_piece - head * queries.columns();
      const int place = sum_place<S::kD>(column, results.tile_dimension(column, d));
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < S::kWarps; i += kHeads) top = fmaxf(top, stats.of[i + head][column].x);
      PartSum sum;
#pragma unroll
      for (int i = 0; i < S::kWarps; i += kHeads) {
        sum.add(stats.of[i + head][column], *reinterpret_cast<const float4*>(left + (i + head) * kRing + place), top);
      }
      if (part.slot >= 0) {
        const int64_t at = static_cast<int64_t>(part.slot) * p.rows + row_of_piece;
        if (d == 0) p.partial_stats[at] = {top, sum.sum};
        *reinterpret_cast<float4*>(p.partial + at * p.pitch + d) = sum.o;
      } else {
        const int kv_head = part.kv_head - warp % kHeads + head;
        const Row row = row_of_part(part, kv_head, column);
        if (S::kManyTokens && !row.valid) continue;
        const float f = finish_row(p, row, queries.kv_head_of(kv_head, column), top, sum.sum);
        store_output<S>(p, row, d, {sum.o.x * f, sum.o.y * f, sum.o.z * f, sum.o.w * f});
      }
    }
    __syncthreads();  // the stages are free again
  }

  // At the end of the share: of the blocks that left pieces of a segment, the last adds them up.  No block waits for another.
  __device__ void end_share(const Walk& w) const {
    __syncthreads();
    const int head = 2 * blockIdx.x, tail = head + 1;
    const bool has_head = share.head.pieces > 0, has_tail = w.slot == tail;
    if (!has_head && !has_tail) return;
    if (threadIdx.x == 0) hand_over_pieces(p, has_head ? head : -1, has_tail ? tail : -1, p.ticket);
    __syncthreads();
    if (has_head) join(share.head);
    if (has_tail) {
      join(Line::cut_at(w, share, share.end - kLead - w.tile / kPlaceUnits, line.places(w.len)));
    }
  }

  __device__ void join(const CutSegment& u) const {
    using Sum = std::conditional_t<S::kInvariant, ExactQuad, Quad>;
    Part part{};
    part.sequence = u.sequence;
    if constexpr (S::kManyTokens) {
      const Sequence s = clamp_sequence(p, load_sequence(p, u.sequence));
      part.len = s.len;
      part.query_begin = s.query_begin;
      part.query_len = s.query_len;
      part.query_tile = u.query_tile;
    }
    join_pieces<Sum>(
        p, u.pieces, [&u](int i) { return u.slot(i); }, kQuads, 0, kHeads * queries.columns() * kQuads,
        [&](int item, const Sum& sum) {
          const int row_of_piece = item / kQuads, head = head_of(row_of_piece), kv_head = u.kv_head + head;
          const int column = row_of_piece - head * queries.columns();
          const Row row = row_of_part(part, kv_head, column);
          if (S::kManyTokens && !row.valid) return;
          store_output<S>(p, row, item % kQuads * 4, sum.finish(p, row, queries.kv_head_of(kv_head, column)));
        });
  }

  // The same with batch_invariant: the warps are a team.  `part`: the last tile of a chunk, whose stage they are done with.
  __device__ void end_chunk(const auto& team, const Part& part, int stage, State& state, auto& kept) const {
    __syncwarp();  // all lanes have read what lay there
    team.end_chunk(state, stage, kept);
    if (!part.ends) return;
    team.for_each_kept(kept, [&](ExactQuad& sum, int item) {
      const int column = item / kQuads, quad = item % kQuads;
      if (part.slot >= 0) {
        ExactQuad::at(p, part.slot, column, quad) = sum;
      } else {
        const Row row = results.row_of_column(part.sequence, part.len, part.kv_head, column);
        store_output<S>(p, row, quad * 4, sum.finish(p, row, part.kv_head));
      }
      sum.clear();
    });
  }

  // Pages of the tiles from `first` on, as look_up_tiles() gives them.
  struct LookedUp {
    Ids ids;
    int first;
  };

  // Starts the copies of the warp's tile at w, if there is one, and walks on.
  __device__ Part start_next(Walk& w, LookedUp& pages, uint32_t stage, bool is_first) const {
    Part next;
    static_cast<TilePart&>(next) = {w.sequence,
                                    w.len,
                                    line.kv_head(w),
                                    first_token(w, w.tile),
                                    loader.table.first_key(w.len),
                                    w.slot,
                                    0,
                                    w.exists,
                                    w.begins,
                                    w.units == 1,
                                    S::kInvariant && (w.tile + 1) % kPlaceUnits == 0};
    if constexpr (S::kManyTokens) {
      next.query_begin = w.query_begin;
      next.query_len = w.query_len;
      next.query_tile = w.query_tile;
    }
    if (w.exists) {
      next.valid = loader.start(stage, next, ids_of(pages.ids), w.tile - pages.first);
      if (next.begins && !is_first) prefetch_queries(next);
      line.step(w);
      if (w.exists && (w.begins || w.tile == pages.first + DecodePages<S>::kAtOnce)) pages = {look_up_tiles(w), w.tile};
    }
    cp_async_commit();
    return next;
  }

  // Of a segment that begins the queries, and the tile.
  __device__ void await_tile(const Part& part, State& state) const {
    if (part.begins) {
      fetch(part, state);
      queries.settle(part.kv_head, state);
    }
    cp_async_wait<kStages - 1>();
    __syncwarp();
  }

  static __device__ int after(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

  __device__ void run() {
    if (!S::kInvariant || p.lengths == Lengths::kAny) wait_for_previous_kernel();
    if (S::kInvariant && !takes_call(p)) return leave_call();
    Walk w = line.start_line();
    LookedUp pages{{}, w.tile};
    if (w.exists) pages.ids = look_up_tiles(w);
    if constexpr (!S::kInvariant) {
      attend_segments(w, pages, [this, first = 0](const Part& part, int stage, int offset, State& state) mutable {
        if (part.begins) first = part.first_token;  // the warp's first tile of the segment
        if (!part.ends) return;
        loader.separate(stage, part, first, kUnitTokens, part.first_token, state);
        end_segment(part, state, offset);
      });
    } else {
      using Team = InvariantTeams<S, true>;  // adding to memory, which the keys drive out of the L1, would take 2 us
      const Team team{p, rings, stats.of[0]};
      typename Team::Kept kept;
      kept.clear();
      attend_segments(w, pages, [&](const Part& part, int, int offset, State& state) {
        if (part.ends_chunk) end_chunk(team, part, offset / S::kStageBytes, state, kept);
      });
    }
    let_next_kernel_start();
    end_share(w);
    if (blockIdx.x == 0 && warp == 0) {
      for (int64_t s = lane; s < p.a.num_seqs; s += 32) report_sequence(p, load_sequence(p, s));
    }
  }

  // end(part, stage, offset, state): what comes after a tile, when its stage is free.
  __device__ void attend_segments(Walk& w, LookedUp& pages, auto&& end) const {
    State state;
    // In iteration i the copies of tile i + stages - 1 start and the pages of the next are looked up: before the wait for
    // tile i or, if late, after it.
    int at = 0, free = 0;  // the stages of tiles i and i + stages - 1
    const uint32_t stage0 = shared_address(rings + warp * S::kRingBytes);
    Part part{};
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      if (S::kLate && i >= 0) {
        __syncwarp();
        part = parts[at];
        if (!part.exists) break;
        if (part.begins) fetch(part, state);
        cp_async_wait<kStages - 2>();
        __syncwarp();  // the tile is there
      }
      // The warps of a segment's heads ask for the same tokens at the same time.
      if constexpr (kHeads > 1) named_barrier_sync(1 + warp / kHeads, kHeads * 32);
      // So do those whose tiles have lines of packed values in common.
      if constexpr (S::kPackedV && !S::kNarrow) {
        if (tiles_share_lines<S>(p.block_size.d)) named_barrier_sync(1, S::kWarps * 32);
      }
      const Part next = start_next(w, pages, stage0 + free * S::kStageBytes, i == 1 - kStages);
      if (lane == 0) parts[free] = next;
      free = after(free);
      if (i < 0) continue;
      if constexpr (S::kLate) {
        if (part.begins) queries.settle(part.kv_head, state);
      } else {
        __syncwarp();
        part = parts[at];
        if (!part.exists) break;
        await_tile(part, state);
      }
      const int offset = at * S::kStageBytes;
      loader.attend(rings + warp * S::kRingBytes, offset, part, state);
      end(part, stage0 + offset, offset, state);
      __syncwarp();  // its stage is free
      at = after(at);
    }
  }
};

// ---- the kernel, its shared memory, and its launch ------------------------------------------------------------------

template <class S>
constexpr int decode_shared_bytes() {
  return S::kWarps * (S::kRingBytes + S::kStages * static_cast<int>(sizeof(PartOf<S>))) +
         static_cast<int>(sizeof(ColumnStats<S>) + sizeof(LineShare));
}

template <class S>
__device__ void run_decode_line(const Problem& p, const CacheCopies& copies, char* memory) {
  auto* stats = reinterpret_cast<ColumnStats<S>*>(memory + S::kWarps * S::kRingBytes);
  auto* all_parts = reinterpret_cast<PartOf<S>*>(stats + 1);
  auto* parts = all_parts + threadIdx.x / 32 * S::kStages;
  auto* share = reinterpret_cast<LineShare*>(all_parts + S::kWarps * S::kStages);
  DecodeKernel<S> kernel{p, copies, *share, parts, memory, *stats};
  kernel.run();
}

template <class S>
struct DecodeLineBlock {
  static constexpr int kThreadsOfBlock = S::kWarps * 32, kBlocksOfSm = S::kBlocksPerSm;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    if constexpr (S::kManyTokens) {
      if (!takes_call(p)) return leave_call();
    }
    run_decode_line<S>(p, copies, memory);
  }
};

template <class S>
void launch_line(const Problem& p, const Step& s, const Launch& launch) {
  static_assert(decode_shared_bytes<S>() == S::kSizes.shared_bytes());
  launch_step<paged_attention_kernel<DecodeLineBlock<S>>>(p, s, s.shared_bytes, launch, copies_of<S>(p));
}

// If there is such a line: KV heads in pairs, if it takes them so, or one by one.
template <class Line, class Single>
void launch_lines(const Problem& p, const Step& s, const Launch& launch) {
  if constexpr (!has_line(Line::kSizes)) {
    fail_without_instance(p, s);
  } else {
    if constexpr (Line::kHeads > 1) {
      if (s.instance.single) return launch_line<Single>(p, s, launch);
    }
    launch_line<Line>(p, s, launch);
  }
}

}  // namespace pykv::attention
