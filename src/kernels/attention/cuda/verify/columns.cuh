// Up to 16 or 32 query rows against tiles of 64 tokens by the tensor cores of sm_90a, for caches of 16-bit elements in rows of
// tokens: as verify/rows.cuh, but with tokens as the rows of the products and queries as their columns.
//
//   S^T = K Q^T     both in shared memory: 64 tokens x 16 or 32 queries in kD / 16 products
//   O^T = V^T P^T   both in shared memory: 64 dimensions x as many queries, or twice as many: weights of bf16 have two parts,
//                   side by side; four products for each 64 dimensions
//
// A product has 64 rows, whoever fills them: queries as rows would be mostly work for nothing, and the power that it takes,
// beside what memory takes, slows the clock.  P lies where the tile's keys were, a token's weights in the line of its key's
// first 64 elements: a warp writes over keys that all have read.
//
// Bottleneck: memory, floor = KV bytes / bandwidth; see docs/kernels/paged_attention.md, Power.
#pragma once

#include "attention/cuda/verify/rows.cuh"
#include "attention/cuda/verify/softmax.cuh"

namespace pykv::attention {

template <class S>
struct WarpgroupColumns : WarpgroupSoftmax<S> {
  using Base = WarpgroupSoftmax<S>;
  using Base::column;
  using Base::kColumns;
  using Base::kD;
  using Base::kMine;
  using Base::kParts;
  using Base::kTerms;
  using Base::kTile;
  using Base::kWeights;
  using Base::lane;
  using Base::p;
  using Base::place_of;
  using Base::queries;
  using Base::sync;
  using Base::thread;
  using Base::warp;
  using typename Base::Mma;
  using typename Base::Scores;
  using typename Base::State;
  using typename Base::Tile;

  static __device__ WarpgroupColumns make(const Problem& p, const CacheCopies& copies, typename Base::Scratch& scratch,
                                          uint32_t queries) {
    return {Base::make(p, copies, scratch, queries)};
  }

  __device__ void compute(const Tile& tile, State& state) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (tile.is_empty()) return;
    const uint64_t key = wgmma_matrix(tile.stage, 1024), query = wgmma_matrix(queries, 1024);
    Scores s;
    const bool whole = this->is_whole(tile.slot.valid);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      Wgmma<Mma, kColumns>::ss(s, wgmma_further(key, k / 4 * kTile * 128 + k % 4 * 32),
                               wgmma_further(query, k / 4 * kColumns * 128 + k % 4 * 32), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);

    this->adjust_scores(tile, state, s, whole);
    this->store_weights(this->weigh(s, state, tile.stage), this->weights_place(tile.stage));
    this->share_weights();

    this->begin_products(state, [&](int t, int i) {
      Wgmma<Mma, kWeights>::template ss<kAcross, kAcross>(
          state.o[i], wgmma_further(key, S::kTileBytes + i * kTile * 128 + t * 16 * 128),
          wgmma_further(key, t * 16 * 128), 1);
    });
    this->end_products(state);
#endif
  }

  // By way of the stage that this segment's last tile leaves, unless pieces lie in stages.
  template <class Pieces>
  __device__ void end_segment(const Unit& u, const State& state, char* stage, const Pieces& pieces) const {
    static_assert(S::kStageBytes >= kColumns * kD * 4);
    auto* sums = reinterpret_cast<float*>(stage);
    pieces.open();
    sync();  // all products have been made
    this->show_weights(state);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int d = k * 64 + warp * 16 + h * 8 + lane / 4;
          float x = state.o[k][place_of(i, h)];
          if constexpr (kTerms == 2) x += state.o[k][kColumns / 2 + place_of(i, h)];
          if constexpr (Pieces::kInStages) {
            pieces.leave_sums(column(i), d, x);
          } else {
            sums[sum_place<kD>(column(i), d)] = x;
          }
        }
      }
    }
    sync();
    if constexpr (Pieces::kInStages) return this->leave_all_stats(u, pieces);
    constexpr int kQuads = kD / 4;
#pragma unroll 1
    for (int x = thread; x < min(p.tile_tokens * p.tile_heads, kColumns) * kQuads; x += kThreads) {
      const int r = x / kQuads, d = x % kQuads * 4;
      const Row row = row_of(p, u, r);
      if (!row.valid) continue;
      float4 o = *reinterpret_cast<const float4*>(sums + sum_place<kD>(r, d));
      const float sum = this->sum_of_weights(r);
      if (u.slot >= 0) {
        if (d == 0) pieces.leave_stats(u, r, {this->maximum_of(r), sum});
        pieces.leave_sums(u, r, d, o);
      } else {
        const float f = finish_row(p, row, u.kv_head, this->maximum_of(r), sum);
        store_output<S>(p, row, d, {o.x * f, o.y * f, o.z * f, o.w * f});
      }
    }
  }

  // leave(): this thread reads nothing more of the stage.
  __device__ void take_tile(const Tile& tile, State& state, auto&& leave, const auto& pieces) const {
    fence_async_proxy();
    compute(tile, state);
    if (tile.ends) end_segment(tile.slot.unit, state, tile.memory, pieces);
    leave();
  }
};

template <class Element>
void launch_line_of_rows(const Problem& p, const Step& s, const Launch& launch) {
  dispatch_rows(s.instance, [&]<int kD, int kRows> {
    if constexpr (kRows == 64) {
      using S = WarpgroupShape<Element, kD>;
      launch_warpgroup_kernel<S, WarpgroupRows<S>>(p, s, launch);
    } else {
      using S = WarpgroupColumnsShape<Element, kD, kRows>;
      launch_warpgroup_kernel<S, WarpgroupColumns<S>>(p, s, launch);
    }
  });
}

}  // namespace pykv::attention
