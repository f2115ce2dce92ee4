// 33 to 64 query rows against tiles of 64 tokens by the tensor cores of sm_90a, for caches of 16-bit elements in rows of tokens:
// what generic/softmax.cuh does by mma.sync, each warp for itself, the four warps do together.
//
//   S = Q K^T     Q in registers, K in shared memory: 64 x 64 in kD / 16 products
//   O = P V       P in registers, V in shared memory: 64 x kD in four products, or eight: bf16 weights have two parts
//
// A warp has 16 rows, as there, and nothing but the products is done together.  A K or V element comes from shared memory
// once for 64 rows.
//
// Bottleneck: memory, floor = KV bytes / bandwidth, and power; see docs/log/paged_attention/details.md.
#pragma once

#include "attention/cuda/generic/results.cuh"
#include "attention/cuda/verify/kernel.cuh"

namespace pykv::attention {

template <class S>
struct VerifyRows {
  using Softmax = RowSoftmax<S>;
  using State = typename Softmax::State;
  using Valid = typename Softmax::Valid;
  using Mma = typename S::Mma;
  using Scratch = attention::Scratch<S>;
  static constexpr int kD = S::kD, kSteps = kD / 16, kTile = S::kTile;
  static constexpr int kHalves = kTile / 32, kTerms = S::kSplitWeights ? 2 : 1;
  using Scores = float[kHalves][1][4][4];           // of 32 tokens each, as adjust_scores() wants them
  using Weights = uint32_t[kTile / 16][kTerms][4];  // rounded, and what rounding left

  const Problem& p;
  Scratch& scratch;
  Softmax softmax;
  SegmentResults<S> results;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  __device__ VerifyRows(const Problem& p, const CacheCopies& copies, Scratch& scratch, uint32_t)
      : p(p), scratch(scratch), softmax(p, copies, scratch, 0), results{p, scratch} {}

  __device__ void begin_segment(const Unit& u, State& s) {
    softmax.begin_segment(u, s);
    if (!s.idle) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      for (int e = 0; e < 4; ++e) s.query[k][e] = 0;
    }
    softmax.clear_sums(s);
  }

  __device__ void before_tile(State&) const {}  // there is nothing to do

  __device__ void compute(const ArrivedTile<kTile>& tile, State& state) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (tile.is_empty()) return;
    const uint32_t stage = tile.stage;
    const Valid& valid = tile.slot.valid;
    const Unit& u = tile.slot.unit;
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
          softmax.adjust_scores(u, state, first, masked ? valid[i] : ~0u, masked, s[i]);
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

  __device__ void weigh(const Scores& s, State& state, Weights& weights) const {
    float top[2], base[2], scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = state.plain ? scratch.rows[warp][h * 8 + lane / 4].scale : 1.f;
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) x = fmaxf(x, fmaxf(s[n / 4][0][n % 4][2 * h], s[n / 4][0][n % 4][2 * h + 1]));
      top[h] = x * scale[h];
    }
    follow_maxima<1, 4>(top, state.maximum[0], [&](int h, float factor) { Softmax::rescale(state, 0, h, factor); });
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = base_of(state.maximum[0][h]);
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

  // leave(): this thread reads nothing more of the stage.
  __device__ void take_tile(const ArrivedTile<kTile>& tile, State& state, auto&& leave, const auto& pieces) {
    fence_async_proxy();
    compute(tile, state);
    leave();
    if (tile.ends) results.end_segment_many(tile.slot.unit, state, pieces);
  }
};

}  // namespace pykv::attention
