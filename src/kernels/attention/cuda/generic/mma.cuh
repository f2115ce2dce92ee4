// Attention over a paged cache on tensor cores (mma.sync, sm_80 and later), for 16-bit data and 16-bit, fp8, int8 or nvfp4
// caches.
//
//   out = softmax(logit(q . k)) . v      by the online softmax, one KV tile after another
//
// Work: see schedule/line.cuh; every block walks a contiguous share of all units.
//   More, Many 64 or 128 rows (query tokens x the heads of a KV head); a warp owns 16 or 32 of them against all tokens of the tile.
//   InvariantMore  64 rows with batch_invariant: as More, in the steps of decoding proper.
// Data: tile_loader.cuh, from the block table to a ring of stages; arithmetic: generic/softmax.cuh.
//
// Bottleneck: few rows are bound by memory, floor = KV bytes / bandwidth, and by the bytes in flight, (stages - 1) * 32 KB *
// blocks per SM.  Prefill is bound by mma.sync and by shared-memory reads: a warp of 32 rows uses each K or V
// fragment twice.
#pragma once

#include "attention/cuda/generic/results.cuh"
#include "attention/cuda/launch.cuh"
#include "attention/cuda/merge/pieces.cuh"
#include "cuda/dependent.cuh"
#include "cuda/launch.h"

namespace pykv::attention {

template <class S>
struct LineMemory : Scratch<S> {
  Walker walker;
  LineEnds ends;
};

template <class S>
struct LineKernel {
  using Memory = LineMemory<S>;
  using Lookup = typename TileLoader<S>::Lookup;
  using TileSlot = typename TileLoader<S>::TileSlot;
  using State = typename RowSoftmax<S>::State;
  static constexpr int kStages = S::kStages;

  const Problem& p;
  Memory& memory;
  TileLoader<S> tiles;
  RowSoftmax<S> softmax;
  SegmentResults<S> results;
  TileSlot* slots;
  char* ring;     // of stages
  char* waiting;  // S::kWaitingBytes

  // One thread: the next unit into its slot.
  __device__ void describe_next(TileSlot& slot) {
    slot.unit = memory.walker.unit;
    if (slot.unit.exists) memory.walker.next(p);
  }

  // Unit j is described in iteration j - stages - 1, its pages are looked up in iteration j - stages, its copies start in
  // iteration j - stages + 1.
  __device__ void run() {
    const uint32_t stage0 = shared_address(ring);
    if (!takes_call(p)) return leave_call();
    wait_for_previous_kernel();
    constexpr bool kLines = !S::kInvariant && S::kMore;  // no prefill
    const SharePosition share = find_share<0, kLines>(p, memory.plan);
    if (tiles.member == 0) {
      memory.walker.start(p, share, &memory.ends);
#pragma unroll 1
      for (int i = 0; i < kStages + 1; ++i) describe_next(slots[i]);
    }
    tiles.sync_team();
    Lookup first[kStages];
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (slots[i].unit.exists) first[i] = tiles.begin_lookup(slots[i].unit);
    }
    if (slots[0].unit.exists) softmax.queries.prefetch_queries(slots[0].unit);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (slots[i].unit.exists) tiles.end_lookup(first[i], slots[i], slots[i].unit.kv_head);
    }
    tiles.sync_team();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      if (slots[i].unit.exists) tiles.load_stage(stage0 + i * S::kStageBytes, slots[i]);
      cp_async_commit();
    }

    State state;
    int at = 0, slot_at = 0;  // the unit's stage and slot
    const auto slot_after = [&](int k) -> TileSlot& {
      return slots[slot_at + k >= S::kSlots ? slot_at + k - S::kSlots : slot_at + k];
    };
    if (slots[0].unit.exists) softmax.begin_segment(slots[0].unit, state);
    for (int i = 0; slots[slot_at].unit.exists; ++i) {
      cp_async_wait<kStages - 2>();
      tiles.sync_team();  // the unit's stage is filled, the last one's free
      TileSlot& lookup_slot = slot_after(kStages);
      const bool looks_up = lookup_slot.unit.exists;
      Lookup lookup;
      if (looks_up) lookup = tiles.begin_lookup(lookup_slot.unit);
      const int free = at == 0 ? kStages - 1 : at - 1;
      const TileSlot& load_slot = slot_after(kStages - 1);
      if (load_slot.unit.exists) {
        tiles.load_stage(stage0 + free * S::kStageBytes, load_slot);
        if (load_slot.unit.begins) softmax.queries.prefetch_queries(load_slot.unit);
      }
      cp_async_commit();
      if (tiles.member == i % 4 * 32) describe_next(slot_after(kStages + 1));

      const TileSlot& slot = slots[slot_at];
      const Unit& unit = slot.unit;
      const int offset = at * S::kStageBytes;
      if constexpr (S::kPackedV) {
        if (!tiles.is_whole(slot.valid)) {
          tiles.clear_invisible(ring + offset + S::kTileBytes, slot.valid);
          tiles.sync_team();
        }
      }
      __syncwarp();
      if (unit.begins && i > 0) softmax.begin_segment(unit, state);
      softmax.compute(stage0 + offset, slot.valid, unit, state);
      if constexpr (S::kInvariant) {
        if (unit.ends_chunk || (unit.first_token + S::kTile) % kPartTokens == 0) {
          results.end_part(state);
          if (unit.ends_chunk) results.end_chunk(unit, state, reinterpret_cast<float4*>(waiting) + threadIdx.x);
          softmax.clear_sums(state);
        }
      } else if (unit.ends_chunk) {
        results.end_segment_many(unit, state, LinePieces{p});
      }
      if (looks_up) tiles.end_lookup(lookup, lookup_slot, lookup_slot.unit.kv_head);
      at = at + 1 == kStages ? 0 : at + 1;
      slot_at = slot_at + 1 == S::kSlots ? 0 : slot_at + 1;
    }
    let_next_kernel_start();
    using Sum = std::conditional_t<S::kInvariant, ExactQuad, Quad>;
    end_share<Sum>(p, memory.ends, [&](const Unit& u, const Row& row, int d, const Sum& sum) {
      store_output<S>(p, row, d, sum.finish(p, row, u.kv_head));
    });
  }
};

template <class S>
struct MmaBlock {
  static constexpr int kThreadsOfBlock = kThreads, kBlocksOfSm = S::kBlocksPerSm;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    char* after = memory + S::kRingBytes;
    auto* scratch = reinterpret_cast<LineMemory<S>*>(after + S::kQueryBytes + S::kWaitingBytes);
    auto* slots = reinterpret_cast<Slot<S::kTile>*>(scratch + 1);
    LineKernel<S> kernel{
        p,     *scratch, {p, copies},           {p, copies, *scratch, shared_address(after)}, {p, *scratch},
        slots, memory,   after + S::kQueryBytes};
    kernel.run();
  }
};

template <class Element, int kD, bool kPackedV, RowClass kRows>
void launch_mma_kernel(const Problem& p, const Step& s, const Launch& launch) {
  using S = Shape<Element, kD, kPackedV, kRows>;
  static_assert(S::kMany);
  constexpr int kSharedBytes = S::kRingBytes + S::kSlots * static_cast<int>(sizeof(Slot<S::kTile>)) + S::kQueryBytes +
                               S::kWaitingBytes + static_cast<int>(sizeof(LineMemory<S>));
  constexpr MmaSizes kSizes = mma_sizes(kKindOf<Element>, kD, kRows);
  static_assert(kSharedBytes == kSizes.shared_bytes && S::kUnitTokens == kSizes.tile);
  static_assert(S::kRows == kSizes.rows && S::kBlocksPerSm == kSizes.blocks_of_sm);
  launch_step<paged_attention_kernel<MmaBlock<S>>>(p, s, kSharedBytes, launch, cache_copies<S>(p.a));
}

template <class Element, int kD, bool kPackedV>
void launch_mma(const Problem& p, const Step& s, const Launch& launch) {
  const bool invariant = p.a.batch_invariant;
  if (invariant) return launch_mma_kernel<Element, kD, kPackedV, RowClass::kInvariantMore>(p, s, launch);
  if constexpr (kD > 128) {
    launch_mma_kernel<Element, kD, kPackedV, RowClass::kMany>(p, s, launch);
  } else {
    if constexpr (has_many_rows(kKindOf<Element>, kPackedV)) {
      if (s.instance.rows > 64) return launch_mma_kernel<Element, kD, kPackedV, RowClass::kMany>(p, s, launch);
    }
    launch_mma_kernel<Element, kD, kPackedV, RowClass::kMore>(p, s, launch);
  }
}

template <class Element>
void launch_mma(const Problem& p, const Step& s, const Launch& launch) {
  const int head_size = s.instance.head_size;
  dispatch_bool(s.instance.packed, [&]<bool kPackedV> {
    if constexpr (!kPackedV || !std::is_same_v<Element, ElementNvfp4>) {  // which has no such layout
      if (head_size > 128) return launch_mma<Element, 256, kPackedV>(p, s, launch);
      if (head_size > 64) return launch_mma<Element, 128, kPackedV>(p, s, launch);
      launch_mma<Element, 64, kPackedV>(p, s, launch);
    }
  });
}

}  // namespace pykv::attention
