// The queries of one KV head as columns of the MMAs (paged_attention_columns.cuh): from memory to fragments, and what a warp keeps
// for them while it goes along the keys.
#pragma once

#include <type_traits>

#include "attention/paged_attention_load.cuh"
#include "attention/paged_attention_query_halves.cuh"

namespace pykv::attention {

template <class S>
struct ColumnQueries : TileLoader<S> {
  using Element = typename S::Element;
  using TileLoader<S>::lane;
  using TileLoader<S>::p;
  static constexpr int kD = S::kD, kSteps = kD / 16;
  static constexpr int kQueryTiles = (S::kColumns + 7) / 8;
  static constexpr int kSums = S::kTwins ? kD / 32 : kD / 16;  // fragments of O^T
  template <bool kTwins>
  using Sums = float[kQueryTiles][kTwins ? kD / 32 : kD / 16][4];
  // Keys of int8 keep an offset, and scores begin at minus what it adds to them: rounding then costs some millionths of the
  // largest score that the query could have.  Values do not: over many keys their sums come near zero.
  static constexpr bool kOffsetKeys = std::is_same_v<Element, Element8<KvFormat::kInt8>> && !S::kInvariant;

  // With kManyTokens: where this lane's queries stand, and their slopes; and the keys that all of the tile see.
  struct Places {
    int position[kQueryTiles][2];
    float slope[kQueryTiles][2];
    int all_from, all_to;
  };
  struct OnePlace {};  // at the end of the sequence

  // For each eight queries; this lane has two of them.
  struct State : std::conditional_t<S::kManyTokens, Places, OnePlace> {
    Sums<S::kTwins> o;                       // rows: dimensions; columns: this lane's queries
    uint32_t query[kQueryTiles][kSteps][2];  // fragments of Q^T
    float maximum[kQueryTiles][2];
    float sum[kQueryTiles][2];    // over this lane's tokens
    float scale[kQueryTiles][2];  // from q . k to the logit, in base 2 if `plain`
    float start[kQueryTiles][2];  // of scores, with kOffsetKeys
    bool plain;                   // scores become logits by a positive factor alone
  };

  __device__ int query_head(int kv_head, int column) const { return kv_head * p.group + column; }

  // With kFolded: which of the two KV heads a column is for; and that head.
  __device__ int half_of(int column) const { return S::kFolded && 2 * column >= p.group; }
  __device__ int kv_head_of(int kv_head, int column) const {
    return S::kFolded ? 2 * kv_head + half_of(column) : kv_head;
  }

  // The query of this lane's column e.
  __device__ int column_of(int i, int e) const {
    const int column = lane % 4 * 2 + e;
    return S::kTwins ? column % 4 : i * 8 + column;
  }

  // Asks for the queries; settle() must come before the first tile.
  __device__ void fetch_queries(int sequence, int kv_head, State& s) const {
    fetch_columns(s, [&](int column, bool& exists) {
      exists = column < p.group;
      return static_cast<const uint16_t*>(p.a.query) + sequence * p.a.query_token_stride +
             query_head(kv_head, exists ? column : 0) * p.a.query_head_stride;
    });
  }

  // With kManyTokens: those of a query tile.
  __device__ void fetch_queries(const Unit& u, State& s) const {
    fetch_columns(s, [&](int column, bool& exists) {
      const Row row = row_of(p, u, column);
      exists = row.valid;
      return this->query_row(row);
    });
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Row row = row_of(p, u, column_of(i, e));
        s.position[i][e] = row.position;
        s.slope[i][e] = p.a.alibi_slopes && row.valid ? p.a.alibi_slopes[row.head] : 0.f;
      }
    }
    const int first = row_of(p, u, 0).position, last = row_of(p, u, p.tile_tokens * p.tile_heads - 1).position;
    s.all_from = first_seen(p, last);
    s.all_to = last_seen(p, first);
  }

  // row(column, exists): where a query begins.
  __device__ void fetch_columns(State& s, auto&& row) const {
    const int c = lane % 4;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      const int column = S::kTwins ? lane / 4 % 4 : i * 8 + lane / 4, first = half_of(column) * p.a.head_size;
      bool exists;
      const uint16_t* q = row(column, exists);
      const auto pair_at = [&](int d) {
        d -= first;
        const bool there = exists && (!S::kFolded || d >= 0) && d < p.a.head_size;
        return there ? *reinterpret_cast<const uint32_t*>(q + d) : 0;
      };
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int d0 = k * 16 + (S::kNarrow ? 4 : 2) * c;
        s.query[i][k][0] = pair_at(d0);
        s.query[i][k][1] = pair_at(S::kNarrow ? d0 + 2 : d0 + 8);
      }
    }
  }

  // Columns that have queries, at most.
  __device__ int columns() const { return S::kManyTokens ? p.tile_tokens * p.tile_heads : p.group; }

  // Returns what the query's scores are to be multiplied by.
  static __device__ float halve_queries(uint32_t (&q)[kSteps][2]) {
    float largest = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) largest = fmaxf(largest, fmaxf(largest_of(q[k][0]), largest_of(q[k][1])));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const HalfScale by(largest);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      q[k][0] = by.halves(q[k][0]);
      q[k][1] = by.halves(q[k][1]);
    }
    return by.undo;
  }

  __device__ void settle(int kv_head, State& s) const {
    float k_scale[2] = {1, 1};  // of the halves
    if constexpr (S::kScaled) {
      k_scale[0] = p.a.k_scale[S::kFolded ? 2 * kv_head : kv_head];
      k_scale[1] = S::kFolded ? p.a.k_scale[2 * kv_head + 1] : k_scale[0];
    }
    s.plain = p.plain_logits && k_scale[0] > 0 && k_scale[1] > 0;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      float factor = S::kScaled && p.a.dtype == DType::kBFloat16 ? halve_queries(s.query[i]) : 1.f;
      if constexpr (kOffsetKeys) {
        factor *= 1 / Element::kOffsetUnit;
        float sum = 0;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float2 q = unpack_pair<half>(s.query[i][k][j]);
            sum += q.x + q.y;
          }
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        for (int e = 0; e < 2; ++e) s.start[i][e] = -Element::kOffset * __shfl_sync(~0u, sum, (lane % 4 * 2 + e) * 4);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s.scale[i][e] = p.a.scale * k_scale[half_of(column_of(i, e))] * (s.plain ? kLog2e : 1.f);
        if (S::kScaled) s.scale[i][e] *= __shfl_sync(~0u, factor, (lane % 4 * 2 + e) * 4);
      }
    }
    clear_sums(s);
  }

  static __device__ void clear_sums(State& s) {
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      s.maximum[i][0] = s.maximum[i][1] = -INFINITY;
      s.sum[i][0] = s.sum[i][1] = 0;
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        for (int e = 0; e < 4; ++e) s.o[i][n][e] = 0;
      }
    }
  }
};

}  // namespace pykv::attention
