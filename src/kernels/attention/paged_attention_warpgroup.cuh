// Up to 64 query rows against tiles of 64 tokens by the tensor cores of sm_90a, for caches of 16-bit or one-byte elements in
// rows of tokens: what paged_attention_softmax.cuh does by mma.sync, each warp for itself, the four warps do together.
//
//   S = Q K^T     Q in registers, K in shared memory: 64 x 64 in kD / 16 products
//   O = P V       P in registers, V in shared memory: 64 x kD in four products, or eight: bf16 weights have two parts
//
// A warp has 16 rows, as there, and nothing but the products is done together.  A K or V element comes from shared memory
// once for 64 rows.  Up to 32, of 16 bits, are the columns of products: paged_attention_warpgroup_columns.cuh.  Elements of one
// byte come as halves, which the copying warps have made of them: paged_attention_warpgroup_widen.cuh.
#pragma once

#include "attention/paged_attention_results.cuh"
#include "attention/paged_attention_warpgroup_widen.cuh"
#include "cuda/dependent.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

template <class Element, int kHeadSize>
struct WarpgroupShape : Shape<Element, kHeadSize, false, RowClass::kMore> {
  using More = Shape<Element, kHeadSize, false, RowClass::kMore>;
  static constexpr bool kWarpgroup = true, kReadOnce = true;
  static constexpr bool kWidened = requires { typename Element::Narrow; };  // of one byte in the cache
  static constexpr bool kScaled = More::kScaled || kWidened;
  static constexpr int kCacheBytes = kWidened ? 1 : More::kBytes;
  static constexpr bool kQueryColumns = false;  // of the products: paged_attention_warpgroup_columns.cuh
  static constexpr bool kSplitWeights = std::is_same_v<typename Element::Mma, bf16>;
  static constexpr int kBlock = 2 * kThreads;  // four warps compute, four copy
  static constexpr int kComputeRegisters = kWidened ? 176 : 192, kCopyRegisters = 256 - kComputeRegisters;
  // What is under way lies in the stages or, half as large, in the raw tiles before them; so much that two blocks fit an SM.
  static constexpr int kStages = kWidened && kHeadSize > 64 ? 2 : More::kStages;
  static constexpr int kRawTiles = !kWidened ? 0 : kHeadSize > 64 ? 2 : 4;
  static constexpr int kRingBytes = kStages * More::kStageBytes, kRawBytes = kRawTiles * More::kStageBytes / 2;
  static constexpr int kSlots = kStages + kRawTiles + 3;
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

  __device__ void compute(uint32_t stage, const Valid& valid, const Unit& u, State& state) {
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
        const bool masked =
            valid[i] != ~0u || p.sparse || hides_some(p, first, last, state.first_position, state.last_position);
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
};

// Four warps compute, in the way of Softmax; the other four walk along the line, look up pages and start copies, as far
// ahead as there are stages.
template <class S, class Softmax>
struct WarpgroupKernel : Softmax {
  using Softmax::lane;
  using Softmax::member;
  using Softmax::p;
  using Softmax::scratch;
  using typename Softmax::Lookup;
  using typename Softmax::State;
  using typename Softmax::TileSlot;
  static constexpr int kStages = S::kStages, kSlots = S::kSlots, kRawTiles = S::kRawTiles;

  TileSlot* slots;
  char* ring;
  uint32_t stage0, barriers;  // shared addresses

  __device__ uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ uint32_t empty(int stage) const { return barriers + (kStages + stage) * 8; }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(full(i), S::kWidened ? kThreads : kThreads + 1);
        mbarrier_init(empty(i), 4);
      }
    }
    wait_for_previous_kernel();
    const SharePosition share = find_share(p, scratch.plan);  // a barrier of all threads
    if (threadIdx.x >= kThreads) {
      give_registers<S::kCopyRegisters>();
      if constexpr (S::kWidened) {
        widen_tiles(share);
      } else {
        copy_tiles(share);
      }
    } else {
      take_registers<S::kComputeRegisters>();
      compute_tiles();
    }
  }

  // One thread describes the next tile while the others end the look-up of this one.
  static constexpr int kGuide = kThreads - 1;

  __device__ void describe_next(TileSlot& slot) {
    Walker& walker = scratch.walkers[0];
    slot.unit = walker.unit;
    if (slot.unit.exists) walker.next(p);
  }

  // Starts the way of a tile's queries from memory, so that its beginning finds them near.
  __device__ void prefetch_rows(const Unit& u) const {
    const Row row = row_of(p, u, member / 2);
    if (row.valid && member % 2 * 64 < p.a.head_size) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(this->query_row(row) + member % 2 * 64));
    }
  }

  static __device__ void sync_copying() { named_barrier_sync(1, kThreads); }

  __device__ void look_up_first(const SharePosition& share, Lookup& ahead) {
    if (member == kGuide) {
      scratch.walkers[0].start(p, share);
      describe_next(slots[0]);
    }
    sync_copying();
    if (slots[0].unit.exists) ahead = this->begin_lookup(slots[0].unit);
  }

  // The pages of the next tile are asked for before this one is copied.  A slot is written again when its tile's successor,
  // too, has been computed, for who ends a segment still reads it.
  __device__ void look_up(TileSlot& slot, TileSlot& next, Lookup& ahead) {
    this->end_lookup(ahead, slot, slot.unit.kv_head);
    if (member == kGuide) describe_next(next);
    sync_copying();
    if (next.unit.exists) ahead = this->begin_lookup(next.unit);
    if (slot.unit.begins) prefetch_rows(slot.unit);
  }

  __device__ void copy_tiles(const SharePosition& share) {
    Lookup ahead;
    look_up_first(share, ahead);
    int stage = 0, parity = 1, at = 0;  // the phase before the first counts as ended
#pragma unroll 1
    for (;;) {
      TileSlot &slot = slots[at], &next = slots[at + 1 == kSlots ? 0 : at + 1];
      const bool exists = slot.unit.exists;
      if (exists) look_up(slot, next, ahead);
      mbarrier_wait(empty(stage), parity);
      if (exists) this->load_stage(stage0 + stage * S::kStageBytes, slot);
      cp_async_arrive(full(stage));
      if (member == 0) mbarrier_arrive(full(stage));  // for what the slot says
      if (!exists) break;
      at = at + 1 == kSlots ? 0 : at + 1;
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    let_next_kernel_start();
  }

  // The same with raw tiles between the cache and the stages.  Tile j is copied in iteration j, to where tile j - kRawTiles
  // lay, which is widened in this iteration.
  __device__ void widen_tiles(const SharePosition& share) {
    const auto widener = TileWidener<S>::make(*this, stage0 + S::kRingBytes);
    Lookup ahead;
    look_up_first(share, ahead);
    int stage = 0, parity = 1, at = 0, raw = 0;
    bool more = true, arrives = false;  // is there a tile to copy, to widen?
#pragma unroll 1
    for (;;) {
      TileSlot &slot = slots[at], &next = slots[at + 1 == kSlots ? 0 : at + 1];
      const TileSlot& done = slots[at < kRawTiles ? at + kSlots - kRawTiles : at - kRawTiles];
      more = more && slot.unit.exists;
      if (more) look_up(slot, next, ahead);
      const bool exists = arrives && done.unit.exists;
      typename TileWidener<S>::Pieces pieces;
      if (exists) {
        cp_async_wait<kRawTiles - 1>();
        widener.read(raw, pieces);
      }
      if (more) widener.copy(raw, slot);
      cp_async_commit();
      if (arrives) {
        mbarrier_wait(empty(stage), parity);
        if (exists) widener.store(stage0 + stage * S::kStageBytes, pieces);
        mbarrier_arrive(full(stage));  // the fence between stores and products is that of who waits
        if (!exists) break;
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      at = at + 1 == kSlots ? 0 : at + 1;
      if (++raw == kRawTiles) {
        raw = 0;
        arrives = true;
      }
    }
    let_next_kernel_start();
  }

  __device__ void compute_tiles() {
    State state;
    int stage = 0, parity = 0, at = 0;
#pragma unroll 1
    for (;;) {
      mbarrier_wait(full(stage), parity);
      fence_async_proxy();
      const TileSlot& slot = slots[at];
      const Unit& unit = slot.unit;
      if (!unit.exists) break;
      if (unit.begins) this->begin_segment(unit, state);
      this->compute(stage0 + stage * S::kStageBytes, slot.valid, unit, state);
      if constexpr (S::kQueryColumns) {
        if (unit.ends) this->end_segment(unit, state, ring + stage * S::kStageBytes);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty(stage));
      if constexpr (!S::kQueryColumns) {
        if (unit.ends) this->end_segment_many(unit, state);
      }
      at = at + 1 == kSlots ? 0 : at + 1;
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
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
  char* after = memory + S::kRingBytes + S::kRawBytes;
  auto* scratch = reinterpret_cast<typename Softmax::Scratch*>(after + S::kQueryBytes);
  auto* slots = reinterpret_cast<Slot<S::kTile>*>(scratch + 1);
  const uint32_t barriers = shared_address(slots + S::kSlots);
  WarpgroupKernel<S, Softmax> kernel{Softmax::make(p, copies, *scratch, shared_address(after)), slots, memory,
                                     shared_address(memory), barriers};
  kernel.run();
#endif
}

template <class S, class Softmax>
bool launch_warpgroup_kernel(const Problem& p, RowClass rows, const Launch& launch) {
  constexpr int kSharedBytes = S::kRingBytes + S::kRawBytes + S::kQueryBytes +
                               S::kSlots * static_cast<int>(sizeof(Slot<S::kTile>)) +
                               static_cast<int>(sizeof(typename Softmax::Scratch)) + 2 * S::kStages * 8;
  static_assert(S::kBlocksPerSm * (kSharedBytes + 1024) <= 228 * 1024);
  static PerDevice resident;
  return launch_line(paged_attention_warpgroup_kernel<S, Softmax>, kSharedBytes, S::kUnitTokens,
                     tiling_of(rows, p.a.head_size), cache_copies<S, S::kCacheBytes>(p.a), p, launch, resident,
                     S::kBlock);
}

}  // namespace pykv::attention
