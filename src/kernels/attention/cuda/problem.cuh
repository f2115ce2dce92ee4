// One call as its kernels see it: sizes, places in the workspace, and the lengths on the device, each within its bounds.
#pragma once

#include "attention/cuda/plan.h"
#include "attention/paged_attention.h"
#include "cuda/approximate.cuh"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/types.cuh"

namespace pykv::attention {

constexpr float kLog2e = 1.4426950408889634f;

struct Problem {
  PagedAttentionArgs a;
  Reporter bad_block, bad_length, bad_query;
  int group;       // query heads of a KV head
  int tile_heads;  // query heads in a query tile
  Divider by_tile_heads;
  int head_tiles;   // query tiles that the heads of one KV head take
  int tile_tokens;  // query tokens in a query tile
  Divider by_head_tiles, by_tile_tokens;
  int rows, kv_tile;  // tile sizes; kv_tile is a power of two
  int place_tokens;   // keys of a place on the line: kv_tile or, with batch_invariant, kChunkTokens
  bool mixed;         // prefill and the kernel after it, which takes other sequences, run at the same time
  int lead;           // places in front of a segment; with batch_invariant none
  Divider by_grid;    // the main kernel's blocks
  Divider by_heads;   // KV heads * head_tiles
  int cluster;        // blocks for a KV head of a sequence, where such a cluster takes it whole
  Divider by_cluster;
  int ways;  // clusters beside each other, which take a sequence's query tiles in turn
  Divider by_ways;
  unsigned early_blocks;  // so many are there, or nearly, before the kernel before has ended
  int block_items;        // four columns of a query each, that a block of it finishes, at most
  Divider by_block_items;
  Divider by_round;        // with batch_invariant: chunks that the teams of a cluster take at once
  int exchange_bytes;      // ... and room for what its blocks send each
  int min_rows, max_rows;  // takes the sequences with min_rows < query tokens * group <= max_rows
  int window;
  float softcap_rate;  // 2 log2(e) / softcap
  bool plain_logits;   // neither soft cap nor ALiBi: only a positive factor lies between scores and logits
  Divider block_size;
  bool sparse;
  int sparse_block, sparse_stride, sparse_local;  // of BlockSparse, each at most kNoWindow
  int pitch;                                      // floats from one partial row to the next
  float* partial;                                 // [2 * grid][rows][pitch], not normalised; or the records of
                                                  // merge/exact.cuh, [2 * grid][rows][pitch / 4]
  float2* partial_stats;                          // [2 * grid][rows]: maximum (base 2) and sum
  uint64_t* tickets;                              // [2 * grid]: merge/pieces.cuh; or notes, merge/combine.cuh
  Lengths lengths;                                // that the launch is for
  Balance balance;                                // if not for any
  uint64_t ticket;                                // of this launch
  Divider by_spans;  // clusters beside each other that share a sequence's keys (decode/spans.cuh),
  int keys_alone;    // if these are more than so many

  // Neither a window nor sparsity.
  __host__ __device__ bool sees_all() const { return window == kNoWindow && !sparse; }
};

// Problem's cache views in bytes, for the copies.
struct CacheCopies {
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int head_bytes;
  bool key_token_fast;    // packed K: copy a chunk index's tokens side by side
  uint32_t key_chunk;     // packed K: from one 16-byte chunk of a key to the next
  uint32_t value_dim;     // packed V: from one dimension to the next
  int value_chunk_shift;  // packed V: log2 of the 16-byte chunks of a dimension that lie side by side
  int part_tokens;        // packed: whole parts of so many tokens, for DecodeLoader::load_parts_of_pages
};

// What a line leaves for the kernel after it to add up (merge/combine.cuh): so many notes, of segments of so many items,
// four columns of a row each.
struct LeftPieces {
  Problem p;
  int notes, items;
};

struct Sequence {
  int len, query_begin, query_len;
  __device__ int context() const { return len - query_len; }  // position of the first query; negative if out of range
};

struct RawSequence {
  int64_t len, begin, end;
};

__device__ inline RawSequence load_sequence(const Problem& p, int64_t s) {
  if (s >= p.a.num_seqs) return {0, 0, 0};
  if (!p.a.cu_query_lens.data) return {p.a.seq_lens[s], s, s + 1};
  return {p.a.seq_lens[s], p.a.cu_query_lens[s], p.a.cu_query_lens[s + 1]};
}

__device__ inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }

__device__ inline Sequence clamp_sequence(const Problem& p, const RawSequence& raw) {
  const int64_t begin = clamp(raw.begin, 0, p.a.num_tokens);
  const int64_t end = clamp(raw.end, begin, p.a.num_tokens);
  return {static_cast<int>(clamp(raw.len, 0, p.a.max_seq_len)), static_cast<int>(begin), static_cast<int>(end - begin)};
}

__device__ inline void report_sequence(const Problem& p, const RawSequence& raw) {
  if (raw.len < 0 || raw.len > p.a.max_seq_len) p.bad_length(raw.len, p.a.max_seq_len + 1);
  if (raw.begin < 0 || raw.begin > p.a.num_tokens) p.bad_query(raw.begin, p.a.num_tokens + 1);
  if (raw.end < raw.begin || raw.end > p.a.num_tokens) p.bad_query(raw.end, p.a.num_tokens + 1);
}

// Few sequences whose block tables have room for long ones: the device alone knows whether clusters suit the call.  A cluster takes
// a KV head of a sequence and is quick where sequences are much alike or short; on the line all blocks share a long one.
// By all lanes of a warp, of all warps alike.  length(s): of a sequence.
__device__ bool suits_clusters(const Balance& balance, int num_seqs, auto&& length) {
  int longest = 0, all = 0;
#pragma unroll 1
  for (int s = threadIdx.x % 32; s < num_seqs; s += 32) {
    const int units = (length(s) + Balance::kUnit - 1) / Balance::kUnit;
    longest = max(longest, units);
    all += units;
  }
  longest = __reduce_max_sync(~0u, longest);
  all = __reduce_add_sync(~0u, all);
  return static_cast<float>(longest) <= balance.share * static_cast<float>(all) + balance.slack;
}

// Is the call, of these lengths, for this launch?  By all lanes of a warp, of all warps alike; of the line of decoding before
// wait_for_previous_kernel(): all blocks of the clusters' kernel, which is launched before it, have read the lengths by then, so
// that what came before it has ended, and if they do not take the call, they have written nothing that would have to be waited for.
__device__ inline bool takes_call(const Problem& p) {
  if (p.lengths == Lengths::kAny) return true;
  const bool by_clusters = suits_clusters(p.balance, static_cast<int>(p.a.num_seqs), [&](int64_t s) {
    return static_cast<int>(clamp(p.a.seq_lens[s], 0, p.a.max_seq_len));
  });
  return by_clusters == (p.lengths == Lengths::kForClusters);
}

// If not: the next kernel may come up, which takes the end of this one for the end of those before, too.
__device__ inline void leave_call() {
  let_next_kernel_start();
  wait_for_previous_kernel();
}

// Of a mixed batch, by the kernel after prefill at the end of its blocks: it has not waited for that one, but ends after it, so that
// whatever waits for this kernel waits for both.
__device__ inline void end_after_prefill(const Problem& p) {
  if (p.mixed && blockIdx.x == 0) wait_for_previous_kernel();
}

// Is the sequence for this launch?  If not, another launch takes it, or it has no query at all.
__device__ inline bool takes(const Problem& p, const Sequence& s) {
  const int64_t rows = static_cast<int64_t>(s.query_len) * p.group;
  return rows > p.min_rows && rows <= p.max_rows;
}

// What a block needs to know of one unit, from the look-up of its pages to its arithmetic.
struct alignas(16) Unit {
  int sequence, sequence_len, query_begin, query_len;
  int kv_head, head_tile, query_tile;
  int first_token;          // of the KV tile
  int first_key, last_key;  // that some row of the query tile may see
  int slot;                 // where a partial result goes; -1: the whole segment is this block's
  bool exists;              // false after the block's last unit
  bool begins, ends;        // this block's part of the segment
  bool first_chunk;         // with batch_invariant: of that part
  bool ends_chunk;          // its sums leave the registers: it ends the part or, with batch_invariant, a chunk
};

// Of a sequence and a KV head, the first query tile; nothing of its keys.
__device__ inline Unit first_unit(int sequence, const Sequence& seq, int kv_head) {
  Unit u{};
  u.sequence = sequence;
  u.sequence_len = seq.len;
  u.query_begin = seq.query_begin;
  u.query_len = seq.query_len;
  u.kv_head = kv_head;
  return u;
}

}  // namespace pykv::attention
