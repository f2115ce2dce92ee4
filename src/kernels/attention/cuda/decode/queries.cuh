// The queries of one KV head as columns of the MMAs (decode/columns.cuh): from memory to fragments, and what a warp keeps
// for them while it goes along the keys.
#pragma once

#include <type_traits>

#include "attention/cuda/half_queries.cuh"
#include "attention/cuda/rows.cuh"
#include "attention/cuda/tile_shape.cuh"
#include "cuda/dependent.cuh"

namespace pykv::attention {

template <class S>
struct ColumnQueries {
  using Element = typename S::Element;
  static constexpr int kD = S::kD, kSteps = kD / 16;
  static constexpr int kQueryTiles = (S::kColumns + 7) / 8;
  static constexpr int kSums = kD / 16;  // fragments of O^T
  // Keys of int8 keep an offset, and scores begin at minus what it adds to them: rounding then costs some millionths of the
  // largest score that the query could have.  Values do not: over many keys their sums come near zero.
  static constexpr bool kOffsetKeys = std::is_same_v<Element, Element8<KvFormat::kInt8>>;

  const Problem& p;
  const int lane = threadIdx.x % 32;

  // With kManyTokens: where this lane's queries stand, and their slopes; and the keys that all of the tile see.
  struct Places {
    int position[kQueryTiles][2];
    float slope[kQueryTiles][2];
    int all_from, all_to;
  };
  struct OnePlace {};  // at the end of the sequence

  // For each eight queries; this lane has two of them.
  struct State : std::conditional_t<S::kManyTokens, Places, OnePlace> {
    float o[kQueryTiles][kSums][4];          // rows: dimensions; columns: this lane's queries
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
  __device__ int column_of(int i, int e) const { return i * 8 + lane % 4 * 2 + e; }

  // The one whose query this lane fetches.
  __device__ int fetched_column(int i) const { return i * 8 + lane / 4; }

  // What this lane fetches of a query: where its first element would be, behind the first of all, and which of those from there on
  // exist.
  struct QueryPlace {
    int64_t at;
    int begin, end;
  };
  struct QueryPlaces {
    QueryPlace of[kQueryTiles];
  };

  // Of one token.
  __device__ QueryPlaces find_queries(int sequence, int kv_head) const {
    return find_columns([&](int column, bool& exists) {
      exists = column < p.group;
      return query_offset(p, sequence, query_head(kv_head, exists ? column : 0));
    });
  }

  static __device__ void have_queries_ready(QueryPlaces& places) {
    for (QueryPlace& place : places.of) have_ready(place.at);
  }

  // Asks for the queries; settle() must come before the first tile.
  __device__ void fetch_queries(int sequence, int kv_head, State& s) const {
    fetch_queries(find_queries(sequence, kv_head), s);
  }

  // With kManyTokens: those of a query tile.
  __device__ void fetch_queries(const Unit& u, State& s) const {
    fetch_queries(find_columns([&](int column, bool& exists) {
                    const Row row = row_of(p, u, column);
                    exists = row.valid;
                    return query_offset(p, row.token, row.head);
                  }),
                  s);
    // As row_of() has it, in fewer instructions: in short calls each counts.
    const int first = u.sequence_len - u.query_len + u.query_tile * p.tile_tokens;
    const int last = min(first + p.tile_tokens, u.sequence_len) - 1;
    const auto find_place = [&](int column, int& position, float& slope) {
      position = min(first + p.by_tile_heads.quotient(column), u.sequence_len - 1);
      slope = 0;
      if (!p.a.alibi_slopes) return;
      const Row row = row_of(p, u, column);
      if (row.valid) slope = p.a.alibi_slopes[row.head];
    };
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) find_place(column_of(i, e), s.position[i][e], s.slope[i][e]);
    }
    s.all_from = first_seen(p, last);
    s.all_to = last_seen(p, first);
  }

  // row(column, exists): where a query begins.
  __device__ QueryPlaces find_columns(auto&& row) const {
    QueryPlaces places;
    const int c = lane % 4, from = c * (S::kRaw ? kD / 4 : S::kNarrow ? 4 : 2);
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      const int column = fetched_column(i), first = half_of(column) * p.a.head_size;
      bool exists;
      const int64_t q = row(column, exists);
      places.of[i] = {q + (from - first), first - from, exists ? first - from + p.a.head_size : 0};
    }
    return places;
  }

  __device__ void fetch_queries(const QueryPlaces& places, State& s) const {
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      const QueryPlace& place = places.of[i];
      const uint16_t* q = static_cast<const uint16_t*>(p.a.query) + place.at;
      const auto pair_at = [&](int x) {
        const bool there = (!S::kFolded || x >= place.begin) && x < place.end;
        return there ? *reinterpret_cast<const uint32_t*>(q + x) : 0;
      };
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int x = k * (S::kRaw ? 4 : 16);
        s.query[i][k][0] = pair_at(x);
        s.query[i][k][1] = pair_at(x + (S::kNarrow || S::kRaw ? 2 : 8));
      }
    }
  }

  // Do all see these keys?
  __device__ bool all_see(const State& s, int first, int last) const { return first >= s.all_from && last <= s.all_to; }

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

  // Against nvfp4 the even ones of eight elements are a step's, and the odd ones the next one's.
  static __device__ void part_evens_from_odds(uint32_t (&q)[kSteps][2]) {
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      const uint32_t pairs[4] = {q[k][0], q[k][1], q[k + 1][0], q[k + 1][1]};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q[k][i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x5410);
        q[k + 1][i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7632);
      }
    }
  }

  __device__ void settle(int kv_head, State& s) const {
    float scales[2] = {1, 1};  // of keys, of the halves
    if constexpr (S::kScaled) {
      scales[0] = p.a.k_scale[S::kFolded ? 2 * kv_head : kv_head];
      scales[1] = S::kFolded ? p.a.k_scale[2 * kv_head + 1] : scales[0];
    }
    s.plain = p.plain_logits && scales[0] > 0 && scales[1] > 0;
    for (float& scale : scales) scale = p.a.scale * scale * (s.plain ? kLog2e : 1.f);
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      float factor = S::kScaled && p.a.dtype == DType::kBFloat16 ? halve_queries(s.query[i]) : 1.f;
      if constexpr (S::kRaw) {
        part_evens_from_odds(s.query[i]);
        factor *= 1 / kE2m1Unit;
      }
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
        s.scale[i][e] = scales[half_of(column_of(i, e))];
        if constexpr (S::kScaled) {
          s.scale[i][e] *= __shfl_sync(~0u, factor, (lane % 4 * 2 + e) * 4);
          if (s.plain) s.scale[i][e] = not_zero(s.scale[i][e]);
        }
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
