// Up to 64 query rows by the tensor cores of sm_90a, where caches are rows of tokens: four warps multiply together, with 64 tokens
// or rows in common, and four others bring the tiles.
//
//   paged_attention_warpgroup_rows.cuh     33 to 64 rows over 16-bit elements, the rows of products
//   paged_attention_warpgroup_columns.cuh  up to 32 over 16-bit elements, the columns of products
//   paged_attention_warpgroup_codes.cuh    up to 64 over elements of one byte, the columns of products
//   paged_attention_warpgroup_softmax.cuh  the softmax of columns
//
// Bottleneck: memory, floor = KV bytes / bandwidth; see docs/kernels/paged_attention.md.
#pragma once

#include "attention/paged_attention_warpgroup_pages.cuh"
#include "cuda/dependent.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

template <class Element, int kHeadSize>
struct WarpgroupShape : Shape<Element, kHeadSize, false, RowClass::kMore> {
  static constexpr bool kWarpgroup = true, kReadOnce = true;
  static constexpr bool kSplitWeights = std::is_same_v<typename Element::Mma, bf16>;
  static constexpr int kBlock = 2 * kThreads, kCopyWarps = 4;  // beside the four that compute
  static constexpr int kComputeRegisters = 192, kCopyRegisters = 64;
  static constexpr bool kQueryColumns = false;  // of the products: paged_attention_warpgroup_columns.cuh
  static constexpr int kWeightBytes = 0;        // that have a place of their own
};

// A tile whose copies have come.
template <int kTokens>
struct ArrivedTile {
  uint32_t stage;  // shared address
  char* memory;    // the same
  const Slot<kTokens>& slot;
  int first_token;
  bool ends;  // this block's part of the segment

  __device__ bool is_empty() const { return (slot.valid[0] | slot.valid[1]) == 0; }
};

// Four warps compute, in the way of Softmax; others walk along the line, look up pages and start copies, as far ahead as there
// are stages.
template <class S, class Softmax>
struct WarpgroupKernel : Softmax {
  using Softmax::lane;
  using Softmax::member;
  using Softmax::p;
  using Softmax::scratch;
  using typename Softmax::Lookup;
  using typename Softmax::State;
  using typename Softmax::TileSlot;
  static constexpr int kStages = S::kStages;
  // Who describes tile j knows that all have left the stage of tile j - 1 - kStages, or, one tile ahead, of j - 2 - kStages; but
  // they may still read what its slot says.
  static constexpr int kSlots = kStages + 3;

  TileSlot* slots;
  int* part_tiles;  // by slot, of a segment's first tile: how many of the segment are this block's
  Unit* copied;     // of the segment that is being copied, for its last tile
  Walker* walkers;  // of the copying warps
  char* ring;
  uint32_t stage0, barriers;  // shared addresses

  __device__ uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ uint32_t empty(int stage) const { return barriers + (kStages + stage) * 8; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(full(i), kThreads + S::kCopyWarps);
        mbarrier_init(empty(i), 4);
      }
    }
    wait_for_previous_kernel();
    const SharePosition share = find_share<0, true>(p, scratch.plan);  // a barrier of all threads
    if (threadIdx.x >= kThreads) {
      give_registers<S::kCopyRegisters>();
      bring_tiles(share);
      let_next_kernel_start();
    } else {
      take_registers<S::kComputeRegisters>();
      compute_tiles();
    }
  }

  __device__ void bring_tiles(const SharePosition& share) {
    if constexpr (S::kQueryColumns) {  // rows leave the copying warps too few registers for walking alone
      if (PageCopies<S>::suits(p, this->copies)) return copy_pages(share);
    }
    copy_tokens(share);
  }

  // Starts the way of a tile's queries from memory, so that its beginning finds them near.
  __device__ void prefetch_rows(const Unit& u, int thread, int threads) const {
#pragma unroll 1
    for (int i = thread; i < 2 * S::kRows; i += threads) {
      const Row row = row_of(p, u, i / 2);
      if (row.valid && i % 2 * 64 < p.a.head_size) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(this->query_row(row) + i % 2 * 64));
      }
    }
  }

  struct Place {
    int stage = 0, parity = 1, slot = 0;  // the phase before the first counts as ended

    __device__ void advance() {
      slot = slot + 1 == kSlots ? 0 : slot + 1;
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  __device__ void wait_for(const Place& at) const { mbarrier_wait(full(at.stage), at.parity ^ 1); }

  // Nobody of this warp reads the stage any more.
  __device__ void leave(const Place& at) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty(at.stage));
  }

  // The slot says that nothing comes.
  __device__ void send_end(const Place& at) {
    mbarrier_wait(empty(at.stage), at.parity);
    arrive(at);
  }

  // What lane 0 has stored, or others in front of a barrier, and the copies that are on their way.
  __device__ void arrive(const Place& at) {
    cp_async_arrive(full(at.stage));
    if (lane == 0) mbarrier_arrive(full(at.stage));
  }

  // Pages of whole groups of eight tokens.  Each warp walks along the line by itself.
  __device__ void copy_pages(const SharePosition& share) {
    const int warp = member / 32;
    // What slots have room for, the places of tokens, nobody notes here.
    static_assert(S::kCopyWarps <= kSlots && sizeof(FoundGroups) <= sizeof(slots->tokens));
    PageCopies<S> pages{p, this->copies, *reinterpret_cast<FoundGroups*>(slots[warp].tokens)};
    const bool describes = warp == 0 && lane == 0;
    Walker& walker = walkers[warp];
    if (lane == 0) walker.start(p, share);  // all note the same
    __syncwarp();
    auto ahead = pages.look_up(KeysOfSegment(walker), 0);
    Place at;
#pragma unroll 1
    while (walker.unit.exists) {
      const KeysOfSegment segment(walker);
      const int head = walker.unit.kv_head;
      if (describes) {
        slots[at.slot].unit = *copied = walker.unit;
        part_tiles[at.slot] = segment.tiles;
      }
      if (warp == 0) prefetch_rows(walker.unit, lane, 32);
      __syncwarp();
      if (lane == 0) walker.next_segment(p);
      __syncwarp();
#pragma unroll 1
      for (int j = 0; j < segment.tiles; ++j) {
        if (j % pages.kTilesAhead == 0) {
          pages.end_lookup(ahead, segment, j, head);
          const int then = j + pages.kTilesAhead;
          ahead = then < segment.tiles ? pages.look_up(segment, then) : pages.look_up(KeysOfSegment(walker), 0);
        }
        TileSlot& slot = slots[at.slot];
        if (describes && j + 1 == segment.tiles) slot.unit = *copied;
        const auto rows = pages.rows_of(j);
        pages.store_valid(rows, slot.valid);
        mbarrier_wait(empty(at.stage), at.parity);
        pages.copy(stage0 + at.stage * S::kStageBytes, j, rows);
        arrive(at);
        at.advance();
      }
    }
    if (describes) slots[at.slot].unit.exists = false;
    send_end(at);
  }

  // Any pages, looked up token by token.  One thread describes the next tile while the others end the look-up of this one.
  __device__ void copy_tokens(const SharePosition& share) {
    constexpr int kGuide = kThreads - 1;
    const auto sync = [] { named_barrier_sync(1, kThreads); };
    const auto describe = [&](TileSlot& slot) {
      if (member != kGuide) return;
      slot.unit = walkers[0].unit;
      part_tiles[&slot - slots] = walkers[0].in_segment;
      if (slot.unit.exists) walkers[0].next(p);
    };
    Lookup ahead;
    if (member == kGuide) walkers[0].start(p, share);
    describe(slots[0]);
    sync();
    if (slots[0].unit.exists) ahead = this->begin_lookup(slots[0].unit);
    Place at;
#pragma unroll 1
    for (; slots[at.slot].unit.exists; at.advance()) {
      TileSlot &slot = slots[at.slot], &next = slots[at.slot + 1 == kSlots ? 0 : at.slot + 1];
      this->end_lookup(ahead, slot, slot.unit.kv_head);
      describe(next);
      sync();
      if (next.unit.exists) ahead = this->begin_lookup(next.unit);
      if (slot.unit.begins) prefetch_rows(slot.unit, member, kThreads);
      mbarrier_wait(empty(at.stage), at.parity);
      this->load_stage(stage0 + at.stage * S::kStageBytes, slot);
      arrive(at);
    }
    send_end(at);
  }

  __device__ void compute_tiles() {
    State state;
    Place at;
#pragma unroll 1
    for (;; at.advance()) {
      wait_for(at);
      const Unit& first = slots[at.slot].unit;
      if (!first.exists) break;
      this->begin_segment(first, state);
      int first_token = first.first_token;
#pragma unroll 1
      for (int left = part_tiles[at.slot];; first_token += S::kTile) {
        const int stage = at.stage * S::kStageBytes;
        const bool ends = --left == 0;
        this->take_tile({stage0 + stage, ring + stage, slots[at.slot], first_token, ends}, state, [&] { leave(at); });
        if (ends) break;
        at.advance();
        wait_for(at);
      }
    }
  }
#endif
};

template <class S, class Softmax>
__global__ void __launch_bounds__(S::kBlock, S::kBlocksPerSm)
    paged_attention_warpgroup_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  char* after = memory + S::kRingBytes;
  auto* scratch = reinterpret_cast<typename Softmax::Scratch*>(after + S::kQueryBytes + S::kWeightBytes);
  auto* slots = reinterpret_cast<Slot<S::kTile>*>(scratch + 1);
  using Kernel = WarpgroupKernel<S, Softmax>;
  auto* barriers = reinterpret_cast<uint64_t*>(slots + Kernel::kSlots);
  auto* copied = reinterpret_cast<Unit*>(barriers + 2 * S::kStages);
  auto* walkers = reinterpret_cast<Walker*>(copied + 1);
  auto* part_tiles = reinterpret_cast<int*>(walkers + S::kCopyWarps);
  Kernel kernel{Softmax::make(p, copies, *scratch, shared_address(after)),
                slots,
                part_tiles,
                copied,
                walkers,
                memory,
                shared_address(memory),
                shared_address(barriers)};
  kernel.run();
#endif
}

template <class S, class Softmax>
bool launch_warpgroup_kernel(const Problem& p, RowClass rows, const Launch& launch) {
  constexpr size_t kNotes = WarpgroupKernel<S, Softmax>::kSlots * (sizeof(Slot<S::kTile>) + sizeof(int)) +
                            2 * S::kStages * sizeof(uint64_t) + sizeof(Unit) + S::kCopyWarps * sizeof(Walker);
  constexpr int kSharedBytes =
      S::kRingBytes + S::kQueryBytes + S::kWeightBytes + static_cast<int>(sizeof(typename Softmax::Scratch) + kNotes);
  static_assert(S::kBlocksPerSm * (kSharedBytes + 1024) <= 228 * 1024);
  static PerDevice resident;
  Tiling tiling = tiling_of(rows, p.a.head_size);
  tiling.blocks_per_sm = std::min(tiling.blocks_per_sm, S::kBlocksPerSm);  // pairs have no workspace for more
  return launch_line(paged_attention_warpgroup_kernel<S, Softmax>, S::kBlock, kSharedBytes, S::kUnitTokens, tiling,
                     copies_of<S>(p), p, launch, resident, S::kFolded);
}

// launch_rows.operator()<kD, kRows>(): tiles of so many rows, of heads of up to kD.
template <class F>
bool launch_for_rows(const Problem& p, RowClass rows, F&& launch_rows) {
  bool done = false;
  dispatch_bool(p.a.head_size <= 64, [&]<bool kSmall> {
    constexpr int kD = kSmall ? 64 : 128;
    done = rows == RowClass::kFew    ? launch_rows.template operator()<kD, 16>()
           : rows == RowClass::kSome ? launch_rows.template operator()<kD, 32>()
                                     : launch_rows.template operator()<kD, 64>();
  });
  return done;
}

}  // namespace pykv::attention
