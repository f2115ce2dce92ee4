// The queries of one KV head against tiles of keys and values, for few query heads: tokens are the rows of the MMAs,
// queries their columns.
//
//   S^T = K Q^T     A: 16 tokens x 16 dimensions of K,   B: 16 dimensions x 8 queries
//   O^T = V^T P^T   A: 16 dimensions x 16 tokens of V^T, B: 16 tokens x 8 queries
//
// So a KV element passes through one MMA for eight queries, not for sixteen, and a lane keeps half the sums that
// generic/softmax.cuh would have it keep.  Between the two, P is transposed by movmatrix.  Elements of one byte
// are widened as there: the permutation of a fragment's dimensions is undone in Q, or in the places of the output.
//
// nvfp4 becomes halves on its way from shared memory: decode/nvfp4_tile.cuh.
//
// bf16 keeps too little of P: what rounding leaves of it goes through a second MMA.
#pragma once

#include <type_traits>

#include "attention/cuda/decode/nvfp4_tile.cuh"
#include "attention/cuda/decode/queries.cuh"
#include "attention/cuda/online_softmax.cuh"
#include "attention/cuda/tile_loader.cuh"
#include "cuda/mma.cuh"

namespace pykv::attention {

template <class S>
struct QueryColumns {
  using Queries = ColumnQueries<S>;
  using State = typename Queries::State;
  using Element = typename S::Element;
  using Mma = typename S::Mma;
  static constexpr int kD = S::kD, kTile = S::kTile, kSteps = kD / 16, kParts = kTile / 16;
  static constexpr int kQueryTiles = Queries::kQueryTiles, kSums = Queries::kSums;
  static constexpr bool kOffsetKeys = Queries::kOffsetKeys;
  static constexpr int kTerms = splits_weights<Mma>(S::kInvariant) ? 2 : 1;  // of a weight: rounded, and the rest
  using Weights = uint32_t[kQueryTiles][kParts][kTerms][2];                  // fragments of P^T

  using Scores = float[kQueryTiles][kParts][4];  // [2 h + e]: of token 16 t + 8 h + lane / 4 and this lane's query e

  const Problem& p;
  const CacheCopies& copies;
  TileLoader<S> tiles{p, copies};
  Queries queries{p};
  const int lane = threadIdx.x % 32;

  static __device__ void widen_keys(uint32_t codes, uint32_t& low, uint32_t& high) {
    if constexpr (kOffsetKeys) {
      Element::widen_with_offset(codes, low, high);
    } else {
      Element::widen(codes, low, high);
    }
  }

  // s = k . q
  __device__ void scores(uint32_t key_stage, const State& state, Scores& s) const {
    constexpr bool kTwoChains = kQueryTiles < 4;
    Scores odd;  // of every second step: half as long a chain of MMAs
    Scores& second = kTwoChains ? odd : s;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int t = 0; t < kParts; ++t) {
        for (int e = 0; e < 4; ++e) {
          s[i][t][e] = kOffsetKeys ? state.start[i][e % 2] : 0.f;
          odd[i][t][e] = 0;
        }
      }
    }
    if constexpr (S::kRaw) {
      add_scores_of_codes(key_stage, state, s, second);
    } else {
      add_scores(key_stage, state, s, second);
    }
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int t = 0; t < kParts; ++t) {
        for (int e = 0; kTwoChains && e < 4; ++e) s[i][t][e] += odd[i][t][e];
      }
    }
  }

  // These of steps 0, 2, ... to `even`, and of the others to `odd`.
  __device__ void add_scores(uint32_t key_stage, const State& state, Scores& even, Scores& odd) const {
    const uint32_t row0 = first_of_keys(key_stage);
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
#pragma unroll
      for (int t = 0; t < kParts; ++t) {
        uint32_t a[2][4];
        if constexpr (S::kNarrow) {
          uint32_t x[4];
          ldmatrix_x4(x, keys_at(row0, k, t));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            widen_keys(x[2 * j], a[j][0], a[j][2]);
            widen_keys(x[2 * j + 1], a[j][1], a[j][3]);
          }
        } else {
          ldmatrix_x4(a[0], keys_at(row0, k, t));
          ldmatrix_x4(a[1], keys_at(row0, k + 1, t));
        }
#pragma unroll
        for (int i = 0; i < kQueryTiles; ++i) {
          mma_16x8x16<Mma>(even[i][t], a[0], state.query[i][k][0], state.query[i][k][1]);
          mma_16x8x16<Mma>(odd[i][t], a[1], state.query[i][k + 1][0], state.query[i][k + 1][1]);
        }
      }
    }
  }

  // Of codes of nvfp4.
  __device__ void add_scores_of_codes(uint32_t key_stage, const State& state, Scores& even, Scores& odd) const {
#pragma unroll
    for (int t = 0; t < kParts; ++t) {
      typename Nvfp4Tile<kD, kTile>::Keys keys;
      keys.read(key_stage, t, lane);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t a[2][4];
        keys.widen(k / 2, a);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < kQueryTiles; ++i) {
            const uint32_t (&q)[2] = state.query[i][k + j];
            mma_16x8x16<Mma>((j == 0 ? even : odd)[i][t], a[j], q[0], q[1]);
          }
        }
      }
    }
  }

  // Where this lane's rows of keys begin, and those of step k for tokens 16 t and following: the address of a row's chunk differs from
  // that of its first chunks by an exclusive or, for stages and rows are aligned so that the chunk's index has its bits to itself.
  __device__ uint32_t first_of_keys(uint32_t key_stage) const {
    return key_stage + TileLoader<S>::key_place(lane % 16, lane / 16);
  }
  static __device__ uint32_t keys_at(uint32_t row0, int k, int t) {
    return S::kPackedV ? row0 + k * S::kBytes * kTile * 16 + t * 256
                       : (row0 ^ k * 16 * S::kBytes) + t * 16 * S::kRowBytes;
  }

  // state.o += v . p
  __device__ void add_values(uint32_t value_stage, [[maybe_unused]] uint32_t valid, const Weights& weights,
                             State& state) const {
#pragma unroll
    for (int t = 0; t < kParts; ++t) {
      const auto multiply = [&](int n, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
        const uint32_t a[4] = {a0, a1, a2, a3};
#pragma unroll
        for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
          for (const auto& w : weights[i][t]) mma_16x8x16<Mma>(state.o[i][n], a, w[0], w[1]);
        }
      };
      uint32_t x[4];
      if constexpr (S::kRaw) {
        typename Nvfp4Tile<kD, kTile>::Values values;
        values.read(value_stage, t, lane, valid);
#pragma unroll
        for (int i = 0; i < kD / 32; ++i) {
          uint32_t a[2][4];
          values.widen(i, a);
#pragma unroll
          for (int j = 0; j < 2; ++j) multiply(2 * i + j, a[j][0], a[j][1], a[j][2], a[j][3]);
        }
      } else if constexpr (!S::kPackedV) {
        // matrices in the order of the fragment or, to be widened, in that of the rows
        const int row = S::kNarrow ? lane % 16 : lane / 16 * 8 + lane % 8;
        const uint32_t row0 = value_stage + swizzled<S::kRowBytes>(t * 16 + row, S::kNarrow ? lane / 16 : lane / 8 % 2);
        constexpr int kPerLoad = S::kNarrow ? 2 : 1;  // sixteen dimensions each
#pragma unroll
        for (int n = 0; n < kD / 16; n += kPerLoad) {
          ldmatrix_x4_trans(x, row0 ^ n * 16 * S::kBytes);
          if constexpr (
              S::kNarrow) {  // [token 2c: d, d + 1; token 2c + 1: d, d + 1] to [d: two tokens; d + 1: two tokens]
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              uint32_t a[4];
              Element::widen(__byte_perm(x[2 * j], 0, 0x3120), a[0], a[1]);
              Element::widen(__byte_perm(x[2 * j + 1], 0, 0x3120), a[2], a[3]);
              multiply(n + j, a[0], a[1], a[2], a[3]);
            }
          } else {
            multiply(n, x[0], x[1], x[2], x[3]);
          }
        }
      } else {
        const int d0 = S::kNarrow ? lane : lane % 16;
        const int chunk = t * 16 * S::kBytes / 16 + (S::kNarrow ? 0 : lane / 16);
        const uint32_t row0 = value_stage + tiles.packed_value_place(d0, chunk);
        constexpr int kPerLoad = S::kNarrow ? 2 : 1;
        const uint32_t step = kPerLoad * 256 << copies.value_chunk_shift;
#pragma unroll
        for (int n = 0; n < kD / 16; n += kPerLoad) {
          ldmatrix_x4(x, row0 + n / kPerLoad * step);
          if constexpr (S::kNarrow) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              uint32_t a[4];
              Element::widen(x[2 * j], a[0], a[2]);
              Element::widen(x[2 * j + 1], a[1], a[3]);
              multiply(n + j, a[0], a[1], a[2], a[3]);
            }
          } else {
            multiply(n, x[0], x[1], x[2], x[3]);
          }
        }
      }
    }
  }

  static __device__ uint32_t transpose(uint32_t pair) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
    return y;
  }

  // What a query does not see of a tile in which others see all that the pages hold.
  __device__ void hide(int first_token, const State& state, Scores& s) const {
    if constexpr (S::kManyTokens) {
      if (queries.all_see(state, first_token, first_token + kTile - 1)) return;
#pragma unroll
      for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int position = state.position[i][e];
          const int first = first_seen(p, position), last = last_seen(p, position);
#pragma unroll
          for (int t = 0; t < kParts; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int token = first_token + token_at<S>(t * 16 + h * 8 + lane / 4);
              if (token < first || token > last) s[i][t][2 * h + e] = -INFINITY;
            }
          }
        }
      }
    }
  }

  // Soft cap and ALiBi: the query stands at the sequence's last token, or where the state says.
  __device__ void to_logits(int kv_head, int first_token, int len, const State& state, Scores& s) const {
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = queries.column_of(i, e);
        float slope =
            p.a.alibi_slopes && column < p.group ? p.a.alibi_slopes[queries.query_head(kv_head, column)] : 0.f;
        int position = len - 1;
        if constexpr (S::kManyTokens) {
          slope = state.slope[i][e];
          position = state.position[i][e];
        }
#pragma unroll
        for (int t = 0; t < kParts; ++t) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int token = first_token + token_at<S>(t * 16 + h * 8 + lane / 4);
            float& x = s[i][t][2 * h + e];
            x = logit(p, x, state.scale[i][e], slope, token - position);
          }
        }
      }
    }
  }

  // A tile whose places of `valid` hold keys; the first is token `first_token`.
  __device__ void compute(uint32_t stage, uint32_t valid, int kv_head, int first_token, int len, State& state) const {
    constexpr uint32_t kAll = kTile == 32 ? ~0u : (1u << kTile % 32) - 1;
    Scores s;
    scores(stage, state, s);
    if (!state.plain) [[unlikely]]
      to_logits(kv_head, first_token, len, state, s);
    if (valid != kAll) {
#pragma unroll
      for (int t = 0; t < kParts; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (valid >> (t * 16 + h * 8 + lane / 4) & 1) continue;
#pragma unroll
          for (int i = 0; i < kQueryTiles; ++i) s[i][t][2 * h] = s[i][t][2 * h + 1] = -INFINITY;
        }
      }
    }
    hide(first_token, state, s);
    Weights weights;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) weigh(i, s[i], state, weights[i]);
    add_values(stage + S::kTileBytes, valid, weights, state);
  }

  // Scores to weights.  With batch_invariant they are added up as in generic/softmax.cuh.
  __device__ void weigh(int i, const float (&s)[kParts][4], State& state,
                        uint32_t (&weights)[kParts][kTerms][2]) const {
    float scale[2], top[2], base[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      scale[e] = state.plain ? state.scale[i][e] : 1.f;
      float x = -INFINITY;
#pragma unroll
      for (int t = 0; t < kParts; ++t) x = fmaxf(x, fmaxf(s[t][e], s[t][2 + e]));
      top[e] = x * scale[e];
    }
    follow_maxima<4, 32>(top, state.maximum[i], [&](int e, float factor) {
      state.sum[i][e] *= factor;
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        state.o[i][n][e] *= factor;
        state.o[i][n][2 + e] *= factor;
      }
    });
#pragma unroll
    for (int e = 0; e < 2; ++e) base[e] = base_of(state.maximum[i][e]);
#pragma unroll
    for (int t = 0; t < kParts; ++t) {
      [[maybe_unused]] float before[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = power_of_2(fmaf(s[t][2 * h], scale[0], -base[0]));
        const float b = power_of_2(fmaf(s[t][2 * h + 1], scale[1], -base[1]));
        if constexpr (!S::kInvariant) {
          state.sum[i][0] += a;
          state.sum[i][1] += b;
        } else if (h == 0) {
          before[0] = a;
          before[1] = b;
        } else {
          state.sum[i][0] += before[0] + a;
          state.sum[i][1] += before[1] + b;
        }
        const uint32_t pair = pack_pair<Mma>(a, b);
        weights[t][0][h] = transpose(pair);
        if constexpr (kTerms == 2) {
          const float2 rounded = unpack_pair<Mma>(pair);
          weights[t][1][h] = transpose(pack_pair<Mma>(a - rounded.x, b - rounded.y));
        }
      }
    }
  }
};

}  // namespace pykv::attention
