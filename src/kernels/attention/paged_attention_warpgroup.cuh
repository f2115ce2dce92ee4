// Up to 64 query rows against tiles of 64 tokens by the tensor cores of sm_90a, for caches of 16-bit elements in rows of tokens:
// what paged_attention_softmax.cuh does by mma.sync, each warp for itself, the four warps do together.
//
//   S = Q K^T     Q in registers, K in shared memory: 64 x 64 in kD / 16 products
//   O = P V       P in registers, V in shared memory: 64 x kD in four products, or eight: bf16 weights have two parts
//
// A warp has 16 rows, as there, and nothing but the products is done together.  A K or V element comes from shared memory
// once for 64 rows.  Up to 32 are the columns of products: paged_attention_warpgroup_columns.cuh.  So are up to 64 over elements
// of one byte: paged_attention_warpgroup_codes.cuh.
#pragma once

#include "attention/paged_attention_results.cuh"
#include "attention/paged_attention_warpgroup_pages.cuh"
#include "cuda/dependent.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

template <class Element, int kHeadSize>
struct WarpgroupShape : Shape<Element, kHeadSize, false, RowClass::kMore> {
  using More = Shape<Element, kHeadSize, false, RowClass::kMore>;
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
};

template <class S>
struct WarpgroupSoftmax : SegmentResults<S> {
  using Base = SegmentResults<S>;
  using Base::kD;
  using Base::kSteps;
  using Base::kTile;
  using Base::lane;
  using Base::p;
  using Base::scratch;
  using Base::warp;
  using typename Base::Mma;
  using typename Base::State;
  using typename Base::Valid;
  using Scratch = attention::Scratch<S>;
  static constexpr int kHalves = kTile / 32, kTerms = S::kSplitWeights ? 2 : 1;
  using Scores = float[kHalves][1][4][4];           // of 32 tokens each, as adjust_scores() wants them
  using Weights = uint32_t[kTile / 16][kTerms][4];  // rounded, and what rounding left

  static __device__ WarpgroupSoftmax make(const Problem& p, const CacheCopies& copies, Scratch& scratch, uint32_t) {
    return {{{{{p, copies}, scratch, 0}}}};
  }

  __device__ void begin_segment(const Unit& u, State& s) {
    Base::begin_segment(u, s);
    if (!s.idle) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      for (int e = 0; e < 4; ++e) s.query[k][e] = 0;
    }
    this->clear_sums(s);
  }

  __device__ void compute(uint32_t stage, const Valid& valid, const Unit& u, State& state) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if ((valid[0] | valid[1]) == 0) return;
    Scores s;
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t keys = wgmma_matrix(stage + k / 4 * kTile * 128 + k % 4 * 32, 1024);
      Wgmma<Mma, kTile>::template rs<kAlong>(reinterpret_cast<float (&)[kTile / 2]>(s), state.query[k], keys, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();

    Weights weights;
    if (state.idle) {
#pragma unroll
      for (auto& step : weights) {
        for (auto& term : step) term[0] = term[1] = term[2] = term[3] = 0;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        const int first = u.first_token + i * 32, last = first + 31;
        const bool masked = valid[i] != ~0u || hides_some(p, first, last, state.first_position, state.last_position);
        if (masked || !state.plain) [[unlikely]]
          this->adjust_scores(u, state, first, masked ? valid[i] : ~0u, masked, s[i]);
      }
      weigh(s, state, weights);
    }

    wgmma_begin();
#pragma unroll
    for (int t = 0; t < kTile / 16; ++t) {
      const uint64_t values = wgmma_matrix(stage + S::kTileBytes + t * 16 * 128, 1024, kTile * 128);
#pragma unroll
      for (const uint32_t (&w)[4] : weights[t]) {
        Wgmma<Mma, kD>::template rs<kAcross>(reinterpret_cast<float (&)[kD / 2]>(state.o), w, values, 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
#endif
  }

  // The sums are kept relative to a maximum that may lag behind by kLag, as in RowSoftmax.
  __device__ void weigh(const Scores& s, State& state, Weights& weights) const {
    constexpr float kLag = 8;
    float top[2], base[2], scale[2];
    bool rose = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = state.plain ? scratch.rows[warp][h * 8 + lane / 4].scale : 1.f;
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) x = fmaxf(x, fmaxf(s[n / 4][0][n % 4][2 * h], s[n / 4][0][n % 4][2 * h + 1]));
      top[h] = fmaxf(x * scale[h], state.maximum[0][h]);
      rose = rose || top[h] > state.maximum[0][h] + kLag;
    }
    if (__any_sync(~0u, rose)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
        const float rescale = power_of_2(state.maximum[0][h] - (top[h] == -INFINITY ? 0.f : top[h]));
        state.maximum[0][h] = top[h];
        state.sum[0][h][0] *= rescale;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          state.o[0][n][2 * h] *= rescale;
          state.o[0][n][2 * h + 1] *= rescale;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = state.maximum[0][h] == -INFINITY ? 0.f : state.maximum[0][h];
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = power_of_2(fmaf(s[n / 4][0][n % 4][2 * h], scale[h], -base[h]));
        const float b = power_of_2(fmaf(s[n / 4][0][n % 4][2 * h + 1], scale[h], -base[h]));
        state.sum[0][h][0] += a + b;
        uint32_t& pair = weights[n / 2][0][n % 2 * 2 + h];
        pair = pack_pair<Mma>(a, b);
        if constexpr (kTerms == 2) {
          const float2 rounded = unpack_pair<Mma>(pair);
          weights[n / 2][1][n % 2 * 2 + h] = pack_pair<Mma>(a - rounded.x, b - rounded.y);
        }
      }
    }
  }

  // leave(): this warp reads nothing more of the stage.
  __device__ void take_tile(const ArrivedTile<kTile>& tile, State& state, auto&& leave) {
    fence_async_proxy();
    compute(tile.stage, tile.slot.valid, tile.slot.unit, state);
    leave();
    if (tile.ends) this->end_segment_many(tile.slot.unit, state);
  }
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
    PageCopies<S> pages{p, this->copies};
    const bool describes = pages.warp == 0 && lane == 0;
    Walker& walker = walkers[pages.warp];
    if (lane == 0) walker.start(p, share);  // all note the same
    __syncwarp();
    auto ahead = pages.look_up(KeysOfSegment(walker), 0);
    Place at;
#pragma unroll 1
    while (walker.unit.exists) {
      const KeysOfSegment segment(walker);
      pages.begin_segment(walker.unit.kv_head);
      if (describes) {
        slots[at.slot].unit = *copied = walker.unit;
        part_tiles[at.slot] = segment.tiles;
      }
      if (pages.warp == 0) prefetch_rows(walker.unit, lane, 32);
      __syncwarp();
      if (lane == 0) walker.next_segment(p);
      __syncwarp();
      int ids = 0;
#pragma unroll 1
      for (int j = 0; j < segment.tiles; ++j) {
        if (j % pages.kTilesAhead == 0) {
          ids = pages.end_lookup(ahead);
          const int then = j + pages.kTilesAhead;
          ahead = then < segment.tiles ? pages.look_up(segment, then) : pages.look_up(KeysOfSegment(walker), 0);
        }
        TileSlot& slot = slots[at.slot];
        if (describes && j + 1 == segment.tiles) slot.unit = *copied;
        const auto part = pages.part_of(segment, ids, j);
        pages.store_valid(part, slot.valid);
        mbarrier_wait(empty(at.stage), at.parity);
        pages.copy(stage0 + at.stage * S::kStageBytes, part);
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
bool launch_warpgroup_kernel(Problem p, RowClass rows, const Launch& launch) {
  constexpr size_t kNotes = WarpgroupKernel<S, Softmax>::kSlots * (sizeof(Slot<S::kTile>) + sizeof(int)) +
                            2 * S::kStages * sizeof(uint64_t) + sizeof(Unit) + S::kCopyWarps * sizeof(Walker);
  constexpr int kSharedBytes =
      S::kRingBytes + S::kQueryBytes + S::kWeightBytes + static_cast<int>(sizeof(typename Softmax::Scratch) + kNotes);
  static_assert(S::kBlocksPerSm * (kSharedBytes + 1024) <= 228 * 1024);
  static PerDevice resident;
  CacheCopies copies = cache_copies<S>(p.a);
  if (S::kFolded) copies.head_bytes *= 2;
  const int grid = launch_main(paged_attention_warpgroup_kernel<S, Softmax>, S::kBlock, kSharedBytes, S::kUnitTokens,
                               tiling_of(rows, p.a.head_size), p, launch, resident, copies);
  if (grid == 0) return false;
  if (S::kFolded) p.a.kv_format = KvFormat::kSame;  // pieces have been multiplied by the scales of their heads
  combine(p, grid, launch);
  return true;
}

}  // namespace pykv::attention
