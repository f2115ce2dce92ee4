// The rows of a query tile against tiles of keys and values: the online softmax on tensor cores.
//
// An element of one byte is widened to half once, in registers: ldmatrix hands a lane neighbouring bytes, so the
// dimensions (or tokens) of a fragment are permuted, and Q (or the order of K's tokens) is permuted to match.  Queries of
// dtype bf16 against such a cache or one of nvfp4 become halves too, scaled row by row by a power of two.
//
// Fragments of 16 rows for a warp may stay in registers for a whole segment; others lie in shared memory.
#pragma once

#include "attention/cuda/generic/queries.cuh"
#include "attention/cuda/online_softmax.cuh"
#include "attention/cuda/tile_loader.cuh"
#include "cuda/mma.cuh"

namespace pykv::attention {

template <class S>
struct RowSoftmax {
  using Valid = typename TileLoader<S>::Valid;
  using Element = typename S::Element;
  using Mma = typename S::Mma;
  static constexpr int kD = S::kD, kSteps = kD / 16, kTile = S::kTile;

  const Problem& p;
  Scratch<S>& scratch;
  TileLoader<S> tiles;
  RowQueries<S> queries;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  __device__ RowSoftmax(const Problem& p, const CacheCopies& copies, Scratch<S>& scratch, uint32_t query_address)
      : p(p), scratch(scratch), tiles{p, copies}, queries{p, scratch, query_address} {}

  // ---- one segment's running state ----------------------------------------------------------------------------------

  // Of the parts of a chunk that are done, where a warp has them all.
  struct PartSums {
    float o[kD / 8][4];
    float maximum[2], sum[2];
    bool one_waits, keeps;  // chunks before it
  };
  struct Nothing {};
  using ChunkSums = std::conditional_t<S::kInvariant, PartSums, Nothing>;

  struct State {
    float o[S::kRowTiles][kD / 8][4];
    uint32_t query[S::kQueriesInRegisters ? kSteps : 1][4];  // fragments
    float maximum[S::kRowTiles][2];
    // Of this lane's columns.  If invariant, of columns 2 c + e and 2 c + e + 8 of every sixteen, as
    // decode/columns.cuh has them.
    float sum[S::kRowTiles][2][S::kInvariant ? 2 : 1];
    int first_position, last_position;  // of the warp's rows
    bool idle;                          // none of the warp's rows exists
    bool plain;                         // scores become logits by a positive factor alone
    ChunkSums chunk;
  };

  static __device__ void clear_chunk(State& s) {
    if constexpr (S::kInvariant) {
#pragma unroll
      for (auto& o : s.chunk.o) {
        for (float& x : o) x = 0;
      }
      for (int h = 0; h < 2; ++h) {
        s.chunk.maximum[h] = -INFINITY;
        s.chunk.sum[h] = 0;
      }
    }
  }

  __device__ void begin_segment(const Unit& u, State& s) {
    const int row0 = warp * S::kWarpRows;
    const int rows = min(p.tile_tokens, u.query_len - u.query_tile * p.tile_tokens) * p.tile_heads;
    s.idle = row0 >= rows;
    if (s.idle) return;
    const float k_scale = S::kScaled ? p.a.k_scale[u.kv_head] : 1.f;
    s.plain = p.plain_logits && k_scale > 0;
    __syncwarp();
    if (lane < S::kWarpRows) {
      const Row row = row_of(p, u, row0 + lane);
      RowState state{row.position, 0, p.a.scale * k_scale * (s.plain ? kLog2e : 1.f), 0};
      if (p.a.alibi_slopes && row.valid) state.slope = p.a.alibi_slopes[row.head];
      if (p.sparse) state.sparse_offset = sparse_offset(p, row.head, u.kv_head);
      scratch.rows[warp][lane] = state;
    }
    __syncwarp();
    if constexpr (S::kQueriesInRegisters) {
      queries.load_query_fragments(u, row0, rows, s.query);
    } else {
      queries.load_query_rows(u, row0);
    }
    __syncwarp();
    if (S::kScaled && s.plain) {
      if (lane < S::kWarpRows) {
        float& scale = scratch.rows[warp][lane].scale;
        scale = not_zero(scale);
      }
      __syncwarp();
    }
    s.first_position = scratch.rows[warp][0].position;
    s.last_position = scratch.rows[warp][S::kWarpRows - 1].position;
    clear_sums(s);
    clear_chunk(s);
    if constexpr (S::kInvariant) s.chunk.one_waits = s.chunk.keeps = false;
  }

  static __device__ void clear_sums(State& s) {
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        for (int e = 0; e < 4; ++e) s.o[i][n][e] = 0;
      }
      for (int h = 0; h < 2; ++h) s.maximum[i][h] = -INFINITY;
      for (auto& row : s.sum[i]) {
        for (float& x : row) x = 0;
      }
    }
  }

  // In these two, the address of a row's chunk differs from that of its first chunks by an exclusive or: stages and rows
  // are aligned so that the chunk's index has its bits to itself.

  // s = q . k for kStep tokens from place r0 of the tile
  __device__ void scores(uint32_t key_stage, int r0, const State& state,
                         float (&s)[S::kRowTiles][S::kStep / 8][4]) const {
    float odd[S::kRowTiles][S::kStep / 8][4];  // if invariant, of every second step: half as long a chain of MMAs
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < S::kStep / 8; ++n) {
        for (int e = 0; e < 4; ++e) s[i][n][e] = odd[i][n][e] = 0;
      }
    }
    const auto sums = [&](int k, int i, int n) -> float (&)[4] { return S::kInvariant && k % 2 ? odd[i][n] : s[i][n]; };
    const uint32_t query_row0 = queries.address + swizzled<2 * kD>(warp * S::kWarpRows + lane % 16, lane / 16);
    const uint32_t key_row0 = key_stage + tiles.key_place(r0 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    constexpr int kAtOnce = S::kNarrow ? 2 : 1;  // k-steps of one ldmatrix
#pragma unroll
    for (int k = 0; k < kSteps; k += kAtOnce) {
      uint32_t a[kAtOnce][S::kRowTiles][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) {
          if constexpr (S::kQueriesInRegisters) {
            for (int e = 0; e < 4; ++e) a[j][i][e] = state.query[k + j][e];
          } else {
            ldmatrix_x4(a[j][i], (query_row0 ^ (k + j) * 32) + i * 16 * 2 * kD);
          }
        }
      }
#pragma unroll
      for (int t = 0; t < S::kStep / 16; ++t) {
        uint32_t b[4];
        ldmatrix_x4(b, S::kPackedV ? key_row0 + k * S::kBytes * kTile * 16 + t * 256
                                   : (key_row0 ^ k * 16 * S::kBytes) + t * 16 * S::kRowBytes);
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            if constexpr (S::kNarrow) {
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                uint32_t b0, b1;
                Element::widen(b[2 * n + j], b0, b1);
                mma_16x8x16<Mma>(sums(k + j, i, 2 * t + n), a[j][i], b0, b1);
              }
            } else {
              mma_16x8x16<Mma>(sums(k, i, 2 * t + n), a[0][i], b[2 * n], b[2 * n + 1]);
            }
          }
        }
      }
    }
    if constexpr (S::kInvariant) {
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int n = 0; n < S::kStep / 8; ++n) {
          for (int e = 0; e < 4; ++e) s[i][n][e] += odd[i][n][e];
        }
      }
    }
  }

  // The weights of kStep tokens as fragments; `rest` is what rounding left of them.
  struct Weights {
    uint32_t rounded[S::kRowTiles][S::kStep / 16][4];
    uint32_t rest[S::kSplitWeights ? S::kRowTiles : 1][S::kStep / 16][4];

    __device__ void set(int i, int t, int e, float low, float high) {
      rounded[i][t][e] = pack_pair<Mma>(low, high);
      if constexpr (S::kSplitWeights) {
        const float2 x = unpack_pair<Mma>(rounded[i][t][e]);
        rest[i][t][e] = pack_pair<Mma>(low - x.x, high - x.y);
      }
    }
  };

  // o += p . v for kStep tokens
  __device__ void add_values(uint32_t value_stage, int r0, const Weights& weights, State& state) const {
    const auto multiply = [&](int t, int n, uint32_t b0, uint32_t b1) {
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
        mma_16x8x16<Mma>(state.o[i][n], weights.rounded[i][t], b0, b1);
        if constexpr (S::kSplitWeights) mma_16x8x16<Mma>(state.o[i][n], weights.rest[i][t], b0, b1);
      }
    };
    uint32_t row0 = value_stage;
    if constexpr (!S::kPackedV) {
      row0 += swizzled<S::kRowBytes>(r0 + lane % 16, lane / 16);
    }
#pragma unroll
    for (int t = 0; t < S::kStep / 16; ++t) {
      uint32_t b[4];
      if constexpr (!S::kPackedV) {
        constexpr int kPerLoad = S::kNarrow ? 4 : 2;  // 8-wide column tiles
#pragma unroll
        for (int n = 0; n < kD / 8; n += kPerLoad) {
          ldmatrix_x4_trans(b, (row0 ^ n * 8 * S::kBytes) + t * 16 * S::kRowBytes);
          if constexpr (
              S::kNarrow) {  // [token 2c: d, d + 1; token 2c + 1: d, d + 1] to [d: two tokens; d + 1: two tokens]
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              uint32_t even0, odd0, even1, odd1;
              Element::widen(__byte_perm(b[2 * h], 0, 0x3120), even0, odd0);
              Element::widen(__byte_perm(b[2 * h + 1], 0, 0x3120), even1, odd1);
              multiply(t, n + 2 * h, even0, even1);
              multiply(t, n + 2 * h + 1, odd0, odd1);
            }
          } else {
            multiply(t, n, b[0], b[1]);
            multiply(t, n + 1, b[2], b[3]);
          }
        }
      } else {
        const int d0 = S::kNarrow ? lane : lane / 16 * 8 + lane % 8;
        const int chunk = (r0 + t * 16) * S::kBytes / 16 + (S::kNarrow ? 0 : lane / 8 % 2);
        const uint32_t packed_row0 = row0 + tiles.packed_value_place(d0, chunk);
        constexpr int kPerLoad = S::kNarrow ? 4 : 2;
#pragma unroll
        for (int n = 0; n < kD / 8; n += kPerLoad) {
          ldmatrix_x4(b, packed_row0 + (n * 128 << tiles.copies.value_chunk_shift));
          if constexpr (S::kNarrow) {
#pragma unroll
            for (int h = 0; h < 4; ++h) {
              uint32_t b0, b1;
              Element::widen(b[h], b0, b1);
              multiply(t, n + h, b0, b1);
            }
          } else {
            multiply(t, n, b[0], b[1]);
            multiply(t, n + 1, b[2], b[3]);
          }
        }
      }
    }
  }

  // This lane's scores of one row, with their places in the step.
  __device__ void for_each_score(float (&s)[S::kStep / 8][4], int h, auto&& body) const {
#pragma unroll
    for (int n = 0; n < S::kStep / 8; ++n) {
      body(s[n][2 * h], n * 8 + lane % 4 * 2);
      body(s[n][2 * h + 1], n * 8 + lane % 4 * 2 + 1);
    }
  }

  // Bits of this lane's places in a step that a row may see, whatever the pages say.
  __device__ uint32_t visible_places(const Unit& u, const RowState& row, int first) const {
    const int low = first_seen(p, row.position), high = last_seen(p, row.position);
    uint32_t bits = 0;
#pragma unroll 1
    for (int n = 0; n < S::kStep / 4; ++n) {
      const int r = n / 2 * 8 + lane % 4 * 2 + n % 2;
      const int key = first + token_at<S>(r);
      bool seen = key >= low && key <= high;
      if (p.sparse) seen = seen && sparse_attends(p, row.sparse_offset, u.sequence_len, key);
      bits |= static_cast<uint32_t>(seen) << r;
    }
    return bits;
  }

  // What is not the same for all scores of a tile: soft cap, ALiBi, masks.
  __device__ void adjust_scores(const Unit& u, const State& state, int first, uint32_t valid, bool masked,
                                float (&s)[S::kRowTiles][S::kStep / 8][4]) const {
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowState& row = scratch.rows[warp][i * 16 + h * 8 + lane / 4];
        if (!state.plain) {
          const float scale = row.scale, slope = row.slope;
          const int distance = first - row.position;
          for_each_score(s[i], h, [&](float& x, int r) { x = logit(p, x, scale, slope, distance + token_at<S>(r)); });
        }
        if (masked) {
          const uint32_t seen = valid & visible_places(u, row, first);
          for_each_score(s[i], h, [&](float& x, int r) {
            if (!(seen >> r & 1)) x = -INFINITY;
          });
        }
      }
    }
  }

  // What rows h of tile i of 16 rows have so far.
  static __device__ void rescale(State& state, int i, int h, float factor) {
    for (float& x : state.sum[i][h]) x *= factor;
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      state.o[i][n][2 * h] *= factor;
      state.o[i][n][2 * h + 1] *= factor;
    }
  }

  __device__ void compute(uint32_t stage, const Valid& tile_valid, const Unit& u, State& state) {
    if (state.idle) return;
#pragma unroll 1
    for (int r0 = 0; r0 < kTile; r0 += S::kStep) {
      constexpr uint32_t kAll = S::kStep == 32 ? ~0u : (1u << S::kStep) - 1;
      const uint32_t valid = tile_valid[r0 / 32] >> r0 % 32 & kAll;
      const int first = u.first_token + r0, last = first + S::kStep - 1;
      const bool hidden = p.a.causal && first > state.last_position;
      if (valid == 0 || hidden) continue;
      const bool masked =
          valid != kAll || p.sparse || hides_some(p, first, last, state.first_position, state.last_position);

      float s[S::kRowTiles][S::kStep / 8][4];
      scores(stage, r0, state, s);
      if (masked || !state.plain) [[unlikely]]
        adjust_scores(u, state, first, masked ? valid : kAll, masked, s);

      Weights weights;
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
        float top[2], base[2], scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          scale[h] = state.plain ? scratch.rows[warp][i * 16 + h * 8 + lane / 4].scale : 1.f;
          float x = -INFINITY;
#pragma unroll
          for (int n = 0; n < S::kStep / 8; ++n) x = fmaxf(x, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
          top[h] = x * scale[h];
        }
        follow_maxima<1, 4>(top, state.maximum[i], [&](int h, float factor) { rescale(state, i, h, factor); });
#pragma unroll
        for (int h = 0; h < 2; ++h) base[h] = base_of(state.maximum[i][h]);
#pragma unroll
        for (int n = 0; n < S::kStep / 8; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float a = power_of_2(fmaf(s[i][n][2 * h], scale[h], -base[h]));
            const float b = power_of_2(fmaf(s[i][n][2 * h + 1], scale[h], -base[h]));
            weights.set(i, n / 2, n % 2 * 2 + h, a, b);
            if constexpr (!S::kInvariant) {
              state.sum[i][h][0] += a + b;
            } else if (n % 2 == 0) {
              s[i][n][2 * h] = a;
              s[i][n][2 * h + 1] = b;
            } else {
              state.sum[i][h][0] += s[i][n - 1][2 * h] + a;
              state.sum[i][h][1] += s[i][n - 1][2 * h + 1] + b;
            }
          }
        }
      }
      add_values(stage + S::kTileBytes, r0, weights, state);
    }
  }
};

}  // namespace pykv::attention
