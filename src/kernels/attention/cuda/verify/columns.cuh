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
// Bottleneck: memory, floor = KV bytes / bandwidth; see docs/log/paged_attention/where_the_time_goes.md.
#pragma once

#include "attention/cuda/verify/softmax.cuh"

namespace pykv::attention {

template <class S>
struct VerifyColumns {
  using Softmax = VerifySoftmax<S>;
  using Queries = VerifyQueries<S>;
  using Scratch = typename Queries::Scratch;
  using Scores = typename Softmax::Scores;
  using State = typename Softmax::State;
  using Tile = typename Softmax::Tile;
  using Mma = typename S::Mma;
  static constexpr int kD = S::kD, kTile = S::kTile, kColumns = Queries::kColumns;
  static constexpr int kMine = Softmax::kMine, kParts = Softmax::kParts;
  static constexpr int kTerms = Softmax::kTerms, kWeights = Softmax::kWeights;

  const Problem& p;
  Softmax softmax;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();
  const int thread = threadIdx.x % kThreads;  // of those who compute

  __device__ VerifyColumns(const Problem& p, const CacheCopies&, Scratch& scratch, uint32_t query_address)
      : p(p), softmax(p, scratch, query_address) {}

  __device__ void begin_segment(const Unit& u, State& s) { softmax.begin_segment(u, s); }
  __device__ void before_tile(State&) const {}  // there is nothing to do

  __device__ void compute(const Tile& tile, State& state) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (tile.is_empty()) return;
    const uint64_t key = wgmma_matrix(tile.stage, 1024), query = wgmma_matrix(softmax.queries.address, 1024);
    Scores s;
    const bool whole = TileLoader<S>::is_whole(tile.slot.valid);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      Wgmma<Mma, kColumns>::ss(s, wgmma_further(key, k / 4 * kTile * 128 + k % 4 * 32),
                               wgmma_further(query, k / 4 * kColumns * 128 + k % 4 * 32), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);

    softmax.adjust_scores(tile, state, s, whole);
    softmax.store_weights(softmax.weigh(s, state, tile.stage), softmax.weights_place(tile.stage));
    softmax.share_weights();

    softmax.begin_products(state, [&](int t, int i) {
      Wgmma<Mma, kWeights>::template ss<kAcross, kAcross>(
          state.o[i], wgmma_further(key, S::kTileBytes + i * kTile * 128 + t * 16 * 128),
          wgmma_further(key, t * 16 * 128), 1);
    });
    softmax.end_products(state);
#endif
  }

  // By way of the stage that this segment's last tile leaves, unless pieces lie in stages.
  template <class Pieces>
  __device__ void end_segment(const Unit& u, const State& state, char* stage, const Pieces& pieces) const {
    static_assert(S::kStageBytes >= kColumns * kD * 4);
    auto* sums = reinterpret_cast<float*>(stage);
    pieces.open();
    Queries::sync();  // all products have been made
    softmax.show_weights(state);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int d = k * 64 + warp * 16 + h * 8 + lane / 4;
          float x = state.o[k][Softmax::place_of(i, h)];
          if constexpr (kTerms == 2) x += state.o[k][kColumns / 2 + Softmax::place_of(i, h)];
          if constexpr (Pieces::kInStages) {
            pieces.leave_sums(Softmax::column(i), d, x);
          } else {
            sums[sum_place<kD>(Softmax::column(i), d)] = x;
          }
        }
      }
    }
    Queries::sync();
    if constexpr (Pieces::kInStages) return softmax.leave_all_stats(u, pieces);
    constexpr int kQuads = kD / 4;
#pragma unroll 1
    for (int x = thread; x < min(p.tile_tokens * p.tile_heads, kColumns) * kQuads; x += kThreads) {
      const int r = x / kQuads, d = x % kQuads * 4;
      const Row row = row_of(p, u, r);
      if (!row.valid) continue;
      float4 o = *reinterpret_cast<const float4*>(sums + sum_place<kD>(r, d));
      const float sum = softmax.sum_of_weights(r);
      if (u.slot >= 0) {
        if (d == 0) pieces.leave_stats(u, r, {softmax.maximum_of(r), sum});
        pieces.leave_sums(u, r, d, o);
      } else {
        const float f = finish_row(p, row, u.kv_head, softmax.maximum_of(r), sum);
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

}  // namespace pykv::attention
