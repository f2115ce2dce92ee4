// Up to 64 query rows by the tensor cores of sm_90a, where caches are rows of tokens: four warps multiply together, with 64 tokens
// or rows in common, and four others bring the tiles.
//
//   verify/rows.cuh     33 to 64 rows over 16-bit elements, the rows of products
//   verify/columns.cuh  up to 32 over 16-bit elements, the columns of products
//   verify/codes.cuh    up to 64 over elements of one byte, the columns of products
//   verify/softmax.cuh  the softmax of columns
//   verify/queries.cuh  their queries in shared memory
//
// Bottleneck: memory, floor = KV bytes / bandwidth; see docs/log/paged_attention/details.md.
#pragma once

#include "attention/cuda/launch.cuh"
#include "attention/cuda/merge/combine.cuh"
#include "attention/cuda/verify/pages.cuh"
#include "attention/cuda/verify/shape.cuh"
#include "cuda/dependent.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

// Four warps compute, in the way of Softmax; others walk along the segments of the block, as Way says, look up pages and start
// copies, as far ahead as there are stages.  Two groups of four that compute take the tiles of a segment in turn.
template <class S, class Softmax, class Way = Walker>
struct VerifyKernel {
  using Lookup = typename TileLoader<S>::Lookup;
  using TileSlot = typename TileLoader<S>::TileSlot;
  using State = typename Softmax::State;
  static constexpr bool kIsLine = std::is_same_v<Way, Walker>;
  static constexpr int kStages = S::kStages;
  // Who describes tile j knows that all have left the stage of tile j - 1 - kStages, or, one tile ahead, of j - 2 - kStages; but
  // they may still read what its slot says.
  static constexpr int kSlots = kStages + 2 + S::kGroups;

  struct Notes {
    TileSlot slots[kSlots];
    Unit copied;                 // of the segment that is being copied, for its last tile
    Way walkers[S::kCopyWarps];  // of the copying warps
    LineEnds ends;
    uint64_t full[kStages], empty[kStages], described[kSlots];  // barriers
    int part_tiles[kSlots];  // of a segment's first tile: how many of the segment are this block's
  };

  const Problem& p;
  TileLoader<S> tiles;
  typename Softmax::Scratch& scratch;
  Softmax softmax;
  Notes& notes;
  char* ring;
  const int lane = threadIdx.x % 32, member = tiles.member;

  __device__ uint32_t full(int stage) const { return shared_address(notes.full) + stage * 8; }
  __device__ uint32_t empty(int stage) const { return shared_address(notes.empty) + stage * 8; }
  __device__ uint32_t described(int slot) const { return shared_address(notes.described) + slot * 8; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // By one thread.
  __device__ void open_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full(i), kThreads + S::kCopyWarps);
      mbarrier_init(empty(i), kThreads);
    }
    for (int i = 0; i < kSlots; ++i) mbarrier_init(described(i), 1);
  }

  __device__ void run() {
    if (threadIdx.x == 0) open_barriers();
    if (!p.mixed) wait_for_previous_kernel();
    if (!takes_call(p)) return;
    const SharePosition share = find_share<0, true>(p, scratch.plan);  // a barrier of all threads
    if (brings_tiles()) {
      give_registers<S::kCopyRegisters>();
      bring_tiles(share);
      let_next_kernel_start();
    } else {
      take_registers<S::kComputeRegisters>();
      compute_tiles(LinePieces{p});
    }
  }

  // share: where the block's segments begin, for Way.
  __device__ void bring_tiles(const auto& share) {
    if constexpr (S::kQueryColumns) {  // rows leave the copying warps too few registers for walking alone
      if (PageCopies<S>::suits(p, tiles.copies)) return copy_pages(share);
    }
    copy_tokens(share);
  }

  // Starts the way of a tile's queries from memory, so that its beginning finds them near.
  __device__ void prefetch_rows(const Unit& u, int thread, int threads) const {
#pragma unroll 1
    for (int i = thread; i < 2 * S::kRows; i += threads) {
      const Row row = row_of(p, u, i / 2);
      if (row.valid && i % 2 * 64 < p.a.head_size) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(query_row(p, row) + i % 2 * 64));
      }
    }
  }

  struct Place {
    int stage = 0, parity = 1, slot = 0;  // of the stage the phase before the first counts as ended
    uint32_t described = 0;               // by slot: the parity of what will be described there next
    static_assert(kSlots <= 32);

    __device__ void advance() {
      if (++slot == kSlots) slot = 0;
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  __device__ void wait_for(const Place& at) const { mbarrier_wait(full(at.stage), at.parity ^ 1); }

  // Of a segment's first tile, which may still be on its way: what the slot says of the segment, or that there is none.
  __device__ const Unit& segment_of(Place& at) const {
    mbarrier_wait(described(at.slot), at.described >> at.slot & 1);
    at.described ^= 1u << at.slot;
    return notes.slots[at.slot].unit;
  }

  // This thread reads nothing more of the stage.
  __device__ void leave(int stage) const { mbarrier_arrive(empty(stage)); }

  // What lane 0 has stored, or others in front of a barrier, and the copies that are on their way.
  __device__ void arrive(const Place& at) {
    cp_async_arrive(full(at.stage));
    if (lane == 0) mbarrier_arrive(full(at.stage));
  }

  // Pages of whole groups of eight tokens.  Each warp walks along the segments by itself.
  __device__ void copy_pages(const auto& share) {
    const int warp = member / 32;
    // Slot::tokens is unused on this path; FoundGroups reuses its memory.
    static_assert(S::kCopyWarps <= kSlots && sizeof(FoundGroups) <= sizeof(notes.slots->tokens));
    PageCopies<S> pages{p, tiles.copies, *reinterpret_cast<FoundGroups*>(notes.slots[warp].tokens)};
    const bool describes = warp == 0 && lane == 0;
    Way& walker = notes.walkers[warp];
    if (lane == 0) walker.start(p, share, describes ? &notes.ends : nullptr);
    __syncwarp();
    auto ahead = pages.look_up(KeysOfSegment(walker), 0);
    if (kIsLine && describes) note_first(p, notes.ends);  // while the pages are on their way
    Place at;
#pragma unroll 1
    while (walker.unit.exists) {
      const KeysOfSegment segment(walker);
      const int head = walker.unit.kv_head;
#pragma unroll 1
      for (int j = 0; j < segment.tiles; ++j) {
        TileSlot& slot = notes.slots[at.slot];
        if (describes) {
          if (j == 0) {
            slot.unit = notes.copied = walker.unit;
            notes.part_tiles[at.slot] = segment.tiles;
            mbarrier_arrive(described(at.slot));
          } else if (j + S::kGroups >= segment.tiles) {
            slot.unit = notes.copied;
          }
        }
        const bool looks_up = j % pages.kTilesAhead == 0;
        if (looks_up) pages.end_lookup(ahead, segment, j, head);
        const auto rows = pages.rows_of(j);
        pages.store_valid(rows, slot.valid);
        mbarrier_wait(empty(at.stage), at.parity);
        pages.copy(shared_address(ring) + at.stage * S::kStageBytes, j, rows);
        arrive(at);
        at.advance();
        // What comes later, when the tile is on its way.
        if (j == 0) {
          if (warp == 0) prefetch_rows(walker.unit, lane, 32);
          __syncwarp();
          if (lane == 0) walker.next_segment(p);
          __syncwarp();
        }
        if (looks_up) {
          const int then = j + pages.kTilesAhead;
          ahead = then < segment.tiles ? pages.look_up(segment, then) : pages.look_up(KeysOfSegment(walker), 0);
        }
      }
    }
    if (describes) {
      notes.slots[at.slot].unit.exists = false;
      mbarrier_arrive(described(at.slot));
    }
  }

  // Any pages, looked up token by token.  One thread describes the next tile while the others end the look-up of this one.
  __device__ void copy_tokens(const auto& share) {
    constexpr int kGuide = kThreads - 1;
    const auto sync = [] { named_barrier_sync(kCopyBarrier, kThreads); };
    const auto describe = [&](int i) {
      if (member != kGuide) return;
      TileSlot& slot = notes.slots[i];
      slot.unit = notes.walkers[0].unit;
      notes.part_tiles[i] = notes.walkers[0].in_segment;
      if (slot.unit.begins || !slot.unit.exists) mbarrier_arrive(described(i));
      if (slot.unit.exists) notes.walkers[0].next(p);
    };
    Lookup ahead;
    if (member == kGuide) {
      notes.walkers[0].start(p, share, &notes.ends);
      if (kIsLine) note_first(p, notes.ends);
    }
    describe(0);
    sync();
    if (notes.slots[0].unit.exists) ahead = tiles.begin_lookup(notes.slots[0].unit);
    Place at;
#pragma unroll 1
    for (; notes.slots[at.slot].unit.exists; at.advance()) {
      const int following = at.slot + 1 == kSlots ? 0 : at.slot + 1;
      TileSlot &slot = notes.slots[at.slot], &next = notes.slots[following];
      tiles.end_lookup(ahead, slot, slot.unit.kv_head);
      describe(following);
      sync();
      if (next.unit.exists) ahead = tiles.begin_lookup(next.unit);
      if (slot.unit.begins) prefetch_rows(slot.unit, member, kThreads);
      mbarrier_wait(empty(at.stage), at.parity);
      tiles.load_stage(shared_address(ring) + at.stage * S::kStageBytes, slot);
      arrive(at);
    }
  }

  static __device__ bool brings_tiles() { return threadIdx.x / kThreads == 1; }

  // Where sums of parts of a segment go: to `pieces`, as in LinePieces.
  template <class Pieces>
  __device__ void compute_tiles(const Pieces& pieces) {
    State state;
    Place at;
#pragma unroll 1
    for (;; at.advance()) {
      const Unit& first = segment_of(at);
      if (!first.exists) break;
      softmax.begin_segment(first, state);
      int first_token = first.first_token, left = notes.part_tiles[at.slot];
      if (computing_group(S::kGroups) > 0) {  // the tile is the other group's
        at.advance();
        first_token += S::kTile;
        --left;
      }
#pragma unroll 1
      for (;; first_token += S::kGroups * S::kTile) {
        softmax.before_tile(state);  // what can go on while it is on its way
        wait_for(at);
        const bool ends = left <= S::kGroups;
        const int stage = at.stage * S::kStageBytes;
        const TileSlot& slot = notes.slots[at.slot];
        const bool keeps = Pieces::kInStages && left <= kStages;  // for the pieces
        softmax.take_tile(
            {shared_address(ring) + stage, ring + stage, slot, first_token, ends}, state,
            [&] {
              if (!keeps) leave(at.stage);
            },
            pieces);
        if (ends) {
          pieces.end_segment(slot.unit);
          for (int i = 0; Pieces::kInStages && i < kStages; i += S::kGroups) leave((at.stage + i) % kStages);
          break;
        }
        left -= S::kGroups;
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i) at.advance();
      }
      if (S::kGroups > 1 && left > 1) at.advance();
    }
  }
#endif
};

// What a block has in shared memory behind the stages, the queries, and the weights of each group that computes.
template <class S, class Softmax, class Way = Walker>
struct VerifyMemory {
  using Kernel = VerifyKernel<S, Softmax, Way>;
  static constexpr int kBytesBefore = S::kRingBytes + S::kQueryBytes + S::kGroups * S::kWeightBytes;

  typename Softmax::Scratch scratch[S::kGroups];
  typename Kernel::Notes notes;

  __device__ Kernel kernel(const Problem& p, const CacheCopies& copies, char* memory) {
    const int group = computing_group(S::kGroups);
    return {
        p,     {p, copies}, scratch[group], Softmax(p, copies, scratch[group], shared_address(memory + S::kRingBytes)),
        notes, memory};
  }
};

// ... in all.
template <class S, class Memory>
constexpr int verify_shared_bytes() {
  constexpr int kBytes = Memory::kBytesBefore + static_cast<int>(sizeof(Memory));
  static_assert(S::kBlocksPerSm * (kBytes + 1024) <= 228 * 1024);
  return kBytes;
}

template <class S, class Softmax>
struct VerifyLineBlock {
  static constexpr int kThreadsOfBlock = S::kBlock, kBlocksOfSm = S::kBlocksPerSm;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Memory = VerifyMemory<S, Softmax>;
    reinterpret_cast<Memory*>(memory + Memory::kBytesBefore)->kernel(p, copies, memory).run();
    end_after_prefill(p);
#endif
  }
};

template <class S, class Softmax>
void launch_verify_kernel(const Problem& p, const Step& s, const Launch& launch) {
  constexpr int kSharedBytes = verify_shared_bytes<S, VerifyMemory<S, Softmax>>();
  static_assert(S::kUnitTokens == kVerifyTile && S::kBlock == 2 * kThreads && S::kBlocksPerSm == 2);
  static_assert(kSharedBytes == verify_sizes(S::kNarrow, S::kD, S::kRows, S::kFolded).line_bytes);
  launch_step<paged_attention_kernel<VerifyLineBlock<S, Softmax>>>(p, s, kSharedBytes, launch, copies_of<S>(p));
}

}  // namespace pykv::attention
