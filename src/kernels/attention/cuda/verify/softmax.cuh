// The softmax of four warps whose products have tokens as rows and up to 64 queries as columns: masks, and weights relative to a
// running maximum.  For caches of 16 bits (verify/columns.cuh) and of one byte
// (verify/codes.cuh: S::kNarrow, S::kScaled).
//
// A column's tokens are spread over all lanes that have it, eight of each warp.  Its maximum lies in shared memory; sums of
// weights stay with each lane until the end of a segment.
#pragma once

#include "attention/cuda/online_softmax.cuh"
#include "attention/cuda/verify/queries.cuh"

namespace pykv::attention {

template <class S>
struct VerifySoftmax {
  using Queries = VerifyQueries<S>;
  using Scratch = typename Queries::Scratch;
  using Mma = typename S::Mma;
  static constexpr int kD = S::kD, kTile = S::kTile;
  static constexpr int kColumns = Queries::kColumns, kHeads = Queries::kHeads, kOwn = Queries::kOwn;
  using Tile = ArrivedTile<kTile>;
  static constexpr int kTerms = S::kSplitWeights ? 2 : 1, kParts = kD / 64;
  static constexpr int kWeights = kColumns * kTerms;  // of a token: rounded, then what rounding left
  static constexpr int kChunks = kWeights / 8;
  static constexpr int kMine = kColumns / 4;            // columns of a lane
  static constexpr bool kKeepsMaxima = kColumns <= 32;  // in registers
  // Maximum of a column that has seen no key: it changes no score, and none that has is it.
  static constexpr float kUnseen = -0.f;
  using Scores = float[kColumns / 2];  // of tokens 16 warp + 8 h + lane / 4, h 0 and 1

  struct State {
    float o[kParts][kWeights / kHeads / 2];   // of dimensions 64 part + 16 warp + 8 h + lane / 4
    float maximum[kKeepsMaxima ? kMine : 1];  // what scratch.maxima say
    float sum[kMine];                         // of weights, of this lane's tokens
    float scale[kHeads];                      // of scores, or one if they have become logits: weights are
                                              // 2^(scale * score - maximum)
    bool some_unseen;                         // has a column seen no key yet?
    int first_seen_by_all, last_seen_by_all;  // first tokens of tiles that neither window nor causal mask touch
    bool plain;                               // scores become logits by a positive factor alone
  };

  const Problem& p;
  Scratch& scratch;
  Queries queries;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();
  const int thread = threadIdx.x % kThreads;  // of those who compute

  __device__ VerifySoftmax(const Problem& p, Scratch& scratch, uint32_t query_address)
      : p(p), scratch(scratch), queries{p, scratch, query_address} {}

  // This lane's column i, and where a product has it.
  static __device__ int column(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  static constexpr int place_of(int i, int h) { return i / 2 * 4 + 2 * h + i % 2; }

  // Is this part of the dimensions of the head that this lane's column i belongs to?
  static constexpr bool has(int part, int i) { return kHeads == 1 || part == i / (kMine / kHeads); }

  __device__ void before_tile(State&) const {}  // there is nothing to do

  // All have left the queries before: a barrier came after the last products with them.
  __device__ void begin_segment(const Unit& u, State& s) {
    float k_scale[kHeads];  // on their way at the same time as the queries
#pragma unroll
    for (int i = 0; i < kHeads; ++i) k_scale[i] = S::kScaled ? p.a.k_scale[u.kv_head * kHeads + i] : 1.f;
    const typename Queries::QueryScale query = queries.store_queries(u);
    s.plain = p.plain_logits && query.is_common;
    for (int i = 0; i < kHeads; ++i) {
      s.scale[i] = p.a.scale * kLog2e;
      if constexpr (S::kScaled) {
        s.scale[i] *= k_scale[i];
        s.scale[i] *= query.undo;
      }
      s.plain = s.plain && s.scale[i] >= 0;
      s.scale[i] = not_zero(s.scale[i]);
    }
    for (float& scale : s.scale) scale = s.plain ? scale : 1;
    if (thread < kColumns) {
      const Row row = queries.row_of_column(u, thread);
      ColumnState state{row.position, 0, p.a.scale};
      if (p.a.alibi_slopes && row.valid) state.slope = p.a.alibi_slopes[row.head];
      if constexpr (S::kScaled) {
        state.scale *= thread < kOwn ? k_scale[0] : k_scale[kHeads - 1];
        state.scale *= queries.first_scratch().of_warps[0][thread];
      }
      scratch.rows[thread] = state;
      scratch.maximum(thread) = kUnseen;
    }
    fence_async_proxy();
    Queries::sync_all();
    const int first = scratch.rows[0].position, last = scratch.rows[kColumns - 1].position;
    s.first_seen_by_all = first_seen(p, last);
    s.last_seen_by_all = last_seen(p, first) - (kTile - 1);
    s.some_unseen = true;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if constexpr (kKeepsMaxima) s.maximum[i] = kUnseen;
      s.sum[i] = 0;
    }
#pragma unroll
    for (auto& part : s.o) {
#pragma unroll
      for (float& x : part) x = 0;
    }
  }

  // Soft cap, ALiBi, masks.  whole: all tokens of the tile are there, of which one had better hear before the scores come.
  __device__ void adjust_scores(const Tile& tile, const State& state, Scores& s, bool whole) const {
    const int first = tile.first_token;
    const bool seen = whole && first >= state.first_seen_by_all && first <= state.last_seen_by_all;
    if (state.plain && seen) return;
    if (!state.plain) to_logits(first, s);
    if (!seen) hide(tile, s);
  }

  __device__ void to_logits(int first_token, Scores& s) const {
    const int key = first_token + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const ColumnState row = scratch.rows[column(i)];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s[place_of(i, h)];
        x = logit(p, x, row.scale, row.slope, key + h * 8 - row.position);
      }
    }
  }

  __device__ void hide(const Tile& tile, Scores& s) const {
    bool is_there[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) is_there[h] = tile.slot.valid[warp / 2] >> (warp % 2 * 16 + h * 8 + lane / 4) & 1;
    const int key = tile.first_token + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int position = scratch.rows[column(i)].position;
      const int first = first_seen(p, position) - key, last = last_seen(p, position) - key;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!is_there[h] || h * 8 < first || h * 8 > last) s[place_of(i, h)] = -INFINITY;
      }
    }
  }

  // To the sums; product(t, i) asks for that of 16 tokens and a part of the dimensions.
  static __device__ void begin_products(State& state, auto&& product) {
    wgmma_pin(state.o);
    wgmma_begin();
#pragma unroll
    for (int t = 0; t < kTile / 16; ++t) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) product(t, i);
    }
    wgmma_commit();
  }

  static __device__ void end_products(State& state) {
    wgmma_wait<0>();
    wgmma_pin(state.o);
  }

  struct Weights {
    uint32_t x[2][kChunks];  // fragments of 8 tokens x 8 columns
  };

  // The sums are kept relative to a maximum that may lag behind, as in online_softmax.cuh; here it is the same in all warps,
  // so that it follows when one of them says so.  The vote is also the barrier after which nobody reads the keys, or the weights
  // before these, where weights will be stored: at the shared address `lines`.  `s` becomes what they are the powers of.
  __device__ Weights weigh(Scores& s, State& state, uint32_t lines) const {
    float most[2] = {-INFINITY, -INFINITY};  // two chains
#pragma unroll
    for (int i0 = 0; i0 < kMine; i0 += 4) {
      float maxima[4];
      read_maxima(state, i0, maxima);
#pragma unroll
      for (int i = i0; i < i0 + 4; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = s[place_of(i, h)];
          x = fmaf(x, state.scale[i / (kMine / kHeads)], -maxima[i - i0]);
          most[h] = fmaxf(most[h], x);
        }
      }
    }
    if (named_barrier_any(Queries::barrier(), kThreads, state.some_unseen || fmaxf(most[0], most[1]) > kLag))
        [[unlikely]]
      follow_maximum(s, state, lines);
    Weights weights;
#pragma unroll
    for (int n = 0; n < kMine / 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = power_of_2(s[place_of(2 * n + e, h)]);
          state.sum[2 * n + e] += x[e];
        }
        uint32_t& rounded = weights.x[h][n];
        rounded = pack_pair<Mma>(x[0], x[1]);
        if constexpr (kTerms == 2) {
          const float2 y = unpack_pair<Mma>(rounded);
          weights.x[h][kMine / 2 + n] = pack_pair<Mma>(x[0] - y.x, x[1] - y.y);
        }
      }
    }
    return weights;
  }

  // Of this lane's columns from i on.
  __device__ void read_maxima(const State& state, int i, float (&maxima)[4]) const {
    if constexpr (kKeepsMaxima) {
#pragma unroll
      for (int k = 0; k < 4; ++k) maxima[k] = state.maximum[i + k];
    } else {
      const float4 x = *reinterpret_cast<const float4*>(&scratch.maxima[lane % 4][i]);
      maxima[0] = x.x;
      maxima[1] = x.y;
      maxima[2] = x.z;
      maxima[3] = x.w;
    }
  }

  // Where this lane stores weights: a line for each token.
  __device__ uint32_t weights_place(uint32_t lines) const {
    const uint32_t line = lines + (warp * 16 + lane % 8) * 128;
    return kChunks == 2 ? line + lane / 16 * 8 * 128 + (lane / 8 % 2 ^ lane % 8) * 16
                        : line + (lane / 8 ^ lane % 8) * 16;
  }

  static __device__ void store_weights(const Weights& weights, uint32_t to) {
    const auto& x = weights.x;
    if constexpr (kChunks == 2) {
      stmatrix_x4(to, {x[0][0], x[0][1], x[1][0], x[1][1]});
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kChunks; n += 4) {
          stmatrix_x4((to ^ n * 16) + h * 8 * 128, {x[h][n], x[h][n + 1], x[h][n + 2], x[h][n + 3]});
        }
      }
    }
  }

  // Before products read what all warps have stored of them.
  static __device__ void share_weights() {
    fence_async_proxy();
    Queries::sync();
  }

  // `s`: relative to the maximum before.  By way of `lines`: 16 lanes leave what they have seen of each column, and a thread of
  // its own finds the maximum, and by how much that has risen.
  __device__ void follow_maximum(Scores& s, State& state, uint32_t lines) const {
    constexpr int kPitch = 80;  // bytes of a column: 16 floats, and lanes that store together meet no bank twice
    static_assert(kColumns * kPitch <= kTile * 128);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float top = fmaxf(s[place_of(i, 0)], s[place_of(i, 1)]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
      if (lane < 16) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(lines + column(i) * kPitch + warp * 16 + lane / 4 * 4), "f"(top)
                     : "memory");
      }
    }
    Queries::sync();
    bool unseen = false;
    if (thread < kColumns) {
      float top = -INFINITY;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float4 x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                     : "r"(lines + thread * kPitch + k * 16)
                     : "memory");
        top = fmaxf(top, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
      }
      float& maximum = scratch.maximum(thread);
      const float before = maximum;
      unseen = is_unseen(before);
      if (!unseen) {
        maximum = before + fmaxf(top, 0.f);
      } else if (top != -INFINITY) {
        maximum = top + 0.f;  // -0 would be unseen
        unseen = false;
      }
      scratch.of_warps[0][thread] = maximum - before;
    }
    state.some_unseen = named_barrier_any(Queries::barrier(), kThreads, unseen);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const float rise = scratch.of_warps[0][column(i)];
      const float rescale = power_of_2(fminf(-rise, 0.f));  // sums of a column that had seen nothing are zero
      if constexpr (kKeepsMaxima) state.maximum[i] = scratch.maximum(column(i));
      state.sum[i] *= rescale;
#pragma unroll
      for (int h = 0; h < 2; ++h) s[place_of(i, h)] -= rise;
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        if (!has(k, i)) continue;
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          for (int h = 0; h < 2; ++h) state.o[k][term * kColumns / 2 + place_of(i % (kMine / kHeads), h)] *= rescale;
        }
      }
    }
  }

  static __device__ bool is_unseen(float maximum) { return __float_as_uint(maximum) == __float_as_uint(kUnseen); }

  // Shows the others each column's sum of weights, of which they know sum_of_weights() behind the next barrier.
  __device__ void show_weights(const State& state) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float sum = state.sum[i];
      for (int m = 4; m < 32; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
      if (lane < 4) scratch.of_warps[warp][column(i)] = sum;
    }
  }

  __device__ float maximum_of(int r) const {
    const float x = scratch.maximum(r);
    return is_unseen(x) ? -INFINITY : x;
  }

  __device__ float sum_of_weights(int r) const {
    return scratch.of_warps[0][r] + scratch.of_warps[1][r] + scratch.of_warps[2][r] + scratch.of_warps[3][r];
  }

  // After show_weights() and a barrier, of all columns.
  __device__ void leave_all_stats(const Unit& u, const auto& pieces) const {
    if (thread < kColumns) pieces.leave_stats(u, thread, {maximum_of(thread), sum_of_weights(thread)});
  }
};

}  // namespace pykv::attention
