// Rows against keys: the page of a key, which rows see it, what its score becomes, and how a row's softmax ends.
#pragma once

#include "attention/cuda/problem.cuh"
#include "cuda/mma.cuh"

namespace pykv::attention {

// The block table's entry for a key, in two words, so that loading it does not wait for its arrival.
struct PageEntry {
  int low, high;
  __device__ int64_t id(const Problem& p) const {
    return p.a.block_tables.is_int64 ? static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low) : low;
  }
};

// An index has one or two words; and how many lie in front of one of them.
__device__ inline int words_of_each(const Index& ids) { return ids.is_int64 ? 2 : 1; }
__device__ inline int64_t words_before(const Index& ids, int64_t i) { return i * ids.stride * words_of_each(ids); }
__device__ inline const int* words_at(const Index& ids, int64_t i) {
  return static_cast<const int*>(ids.data) + words_before(ids, i);
}

// Where the table has a key's page, and the words of an entry.
struct PlaceInTable {
  const int* words;
  int step;
};
__device__ inline int64_t words_before_page(const Problem& p, int sequence, int key) {
  const int64_t at = sequence * p.a.block_table_stride + p.block_size.quotient(key) * p.a.block_tables.stride;
  return at * words_of_each(p.a.block_tables);
}
__device__ inline PlaceInTable place_in_table(const Problem& p, int64_t words_before) {
  return {static_cast<const int*>(p.a.block_tables.data) + words_before, words_of_each(p.a.block_tables)};
}
__device__ inline PlaceInTable place_in_table(const Problem& p, int sequence, int key) {
  return place_in_table(p, words_before_page(p, sequence, key));
}

__device__ inline PageEntry load_page(const Problem& p, int sequence, int key) {
  const auto [words, step] = place_in_table(p, sequence, key);
  return {words[0], step > 1 ? words[1] : 0};
}

// The row r of a query tile: a token of the batch, its position in the sequence, and a query head.
struct Row {
  int token, position, head;
  bool valid;
};

__device__ inline Row row_of(const Problem& p, const Unit& u, int r) {
  const int tile_token = p.by_tile_heads.quotient(r), tile_head = r - tile_token * p.tile_heads;
  const int token = u.query_tile * p.tile_tokens + tile_token, head = u.head_tile * p.tile_heads + tile_head;
  const bool valid = tile_token < p.tile_tokens && token < u.query_len && head < p.group;
  return {u.query_begin + token, u.sequence_len - u.query_len + min(token, u.query_len - 1), u.kv_head * p.group + head,
          valid};
}

// Elements in front of a query; and where those of a row begin, if they have 16 bits.
__device__ inline int64_t query_offset(const Problem& p, int token, int head) {
  return token * p.a.query_token_stride + head * p.a.query_head_stride;
}
__device__ inline const uint16_t* query_row(const Problem& p, const Row& row) {
  return static_cast<const uint16_t*>(p.a.query) + query_offset(p, row.token, row.head);
}

// Sparsity of a head: its offset modulo vert_stride.
__device__ inline int sparse_offset(const Problem& p, int head, int kv_head) {
  const BlockSparse& s = p.a.sparse;
  const int64_t offset = s.sliding_step >= 0 ? (s.tp_rank * p.a.num_heads + head) * s.sliding_step + 1
                                             : (s.tp_rank * p.a.num_kv_heads + kv_head) * -s.sliding_step + 1;
  return static_cast<int>(offset % s.vert_stride);
}

__device__ inline bool sparse_attends(const Problem& p, int offset, int sequence_len, int key) {
  const int page_begin = key - p.block_size.remainder(key);
  const int kb = page_begin / p.sparse_block, qb = (sequence_len - 1) / p.sparse_block;
  return (kb + offset) % p.sparse_stride == 0 || kb > qb - p.sparse_local;
}

// For any of the heads of a query tile.
__device__ inline bool sparse_attends_any(const Problem& p, const Unit& u, int key) {
  for (int h = 0; h < p.tile_heads; ++h) {
    const int head = u.head_tile * p.tile_heads + h;
    if (head >= p.group) break;
    if (sparse_attends(p, sparse_offset(p, u.kv_head * p.group + head, u.kv_head), u.sequence_len, key)) return true;
    if (p.a.sparse.sliding_step <= 0) break;  // all heads of the group are alike
  }
  return false;
}

// May some row of the query tile see this key?
__device__ inline bool is_wanted(const Problem& p, const Unit& u, int key) {
  return key >= u.first_key && key <= u.last_key && key < u.sequence_len &&
         (!p.sparse || sparse_attends_any(p, u, key));
}

// Does the window or the causal mask hide a key of first .. last from a row of these positions?
__device__ inline bool hides_some(const Problem& p, int first, int last, int first_position, int last_position) {
  return (p.a.causal && last > first_position) ||
         (p.window != kNoWindow && (last_position - first >= p.window || last - first_position >= p.window));
}

// The first and the last key that the window and the causal mask let a position see.
__device__ inline int first_seen(const Problem& p, int position) { return position - p.window + 1; }
__device__ inline int last_seen(const Problem& p, int position) {
  return p.a.causal ? position : position + p.window - 1;
}

// Of scores of which some are hidden: a positive factor that has become zero would make those no numbers.
__device__ inline float not_zero(float scale) { return fmaxf(scale, 0x1p-126f); }

// From a score q.k to the logit in base-2 units, with scale, soft cap and ALiBi.  Each rounding is spelled out: with
// batch_invariant all kernels must give the same bits.
__device__ inline float logit(const Problem& p, float score, float scale, float slope, int distance) {
  float x = __fmul_rn(score, scale);
  if (p.a.softcap != 0) {
    const float t = __fmul_rn(x, p.softcap_rate);  // 2 log2(e) x / softcap
    if (fabsf(t) < 0.72f) {  // tanh's series to the seventh power; the rest is below 4e-7 of the value
      const float square = __fmul_rn(t, t);
      x = __fmul_rn(x, fmaf(square, fmaf(square, fmaf(square, -9.352143e-5f, 1.9236258e-3f), -4.0037751e-2f), 1.f));
    } else {
      x = __fmul_rn(p.a.softcap, 1 - __fdividef(2.f, power_of_2(t) + 1));  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
    }
  }
  return __fmul_rn(fmaf(slope, static_cast<float>(distance), x), kLog2e);
}

// Ends the softmax of one row: folds in the sink, writes the LSE, returns the factor for the sum of p * v.
__device__ inline float finish_row(const Problem& p, const Row& row, int kv_head, float maximum, float sum) {
  float rescale = 1;
  if (p.a.sinks) {
    const float sink = p.a.sinks[row.head] * kLog2e;
    if (sink != -INFINITY) {
      const float top = fmaxf(maximum, sink);
      rescale = exp2f(maximum - top);
      sum = sum * rescale + exp2f(sink - top);
      maximum = top;
    }
  }
  if (p.a.lse) {
    p.a.lse[row.head * p.a.lse_head_stride + row.token * p.a.lse_token_stride] =
        sum == 0 ? -INFINITY : (maximum + log2f(sum)) / kLog2e;
  }
  const float v_scale = p.a.kv_format == KvFormat::kSame ? 1.f : p.a.v_scale[kv_head];
  return sum == 0 ? 0.f : rescale * v_scale / (sum + p.a.denominator_epsilon);
}

// Where the output of a row begins.
template <class T>
__device__ inline T* output_row(const Problem& p, const Row& row) {
  return static_cast<T*>(p.a.out) + row.token * p.a.out_token_stride + row.head * p.a.out_head_stride;
}

// Four columns of a row of the output, from `d` on.
template <class T>
__device__ void store_columns(const Problem& p, T* out, int d, float4 x) {
  if (d >= p.a.head_size) return;
  *reinterpret_cast<uint2*>(out + d) = {pack_pair<T>(x.x, x.y), pack_pair<T>(x.z, x.w)};
}

template <class S>
__device__ void store_output(const Problem& p, const Row& row, int d, float4 x) {
  if constexpr (!S::kScaled) {
    store_columns(p, output_row<typename S::Mma>(p, row), d, x);
  } else if (p.a.dtype == DType::kBFloat16) {
    store_columns(p, output_row<bf16>(p, row), d, x);
  } else {
    store_columns(p, output_row<half>(p, row), d, x);
  }
}

}  // namespace pykv::attention
