// Attention over a paged KV cache: ragged prefill, chunked prefill and decode in one batch.
// One kernel idea behind pykv_paged_attention, pykv_paged_attention_v1 and pykv_paged_attention_v2.
#pragma once

#include "core/args.h"
#include "core/nvfp4.h"
#include "cpu/isa.h"

namespace pykv {

// Address of one element of a paged cache, in elements from its start.  With `chunk` = 16 bytes of elements for the
// packed K layout and the whole head for the flash layouts, all layouts differ in strides alone:
//   key   (b, o, h, d) = b * block + o * token + h * head + (d / chunk) * chunk_stride + d % chunk
//   value (b, o, h, d) = b * block + o * token + h * head + d * dim
// For kNvfp4 these are the addresses, in bytes, of the codes of a token's head; the pages of args have those of the scales.
struct KeyCacheView {
  const void* data;
  int64_t block, token, head, chunk_stride;
  int chunk;
};

struct ValueCacheView {
  const void* data;
  int64_t block, token, head, dim;  // flash: dim = 1;  packed: token = 1, dim = block_size
};

// A key is attended if it is visible (causal, window) and, when vert_stride > 1, its sparsity block is:
//   (kb + offset(head)) % vert_stride == 0  or  kb > qb - local_blocks,
// where kb = (first token of the key's cache block) / block_size, qb = (seq_len - 1) / block_size and
//   offset = (tp_rank * num_heads + head) * sliding_step + 1           if sliding_step >= 0
//          = (tp_rank * num_kv_heads + kv_head) * -sliding_step + 1    otherwise.
struct BlockSparse {
  int64_t tp_rank, local_blocks, vert_stride, block_size, sliding_step;
};

inline constexpr int64_t kMostInvariantTokens = int64_t{1} << 23;  // max_seq_len with batch_invariant

struct PagedAttentionArgs {
  const char* op;  // which entry was called, for reports
  DType dtype;     // of out and query: float32, float16 or bfloat16
  KvFormat kv_format;

  void* out;          // [num_tokens, num_heads, head_size]
  const void* query;  // [num_tokens, num_heads, head_size], innermost contiguous
  KeyCacheView key;
  ValueCacheView value;
  Nvfp4Page key_page, value_page;                                                    // kNvfp4 alone
  int64_t out_token_stride, out_head_stride, query_token_stride, query_head_stride;  // elements
  float* lse;  // [num_heads, num_tokens] natural log of the softmax denominator (sinks included), or null
  int64_t lse_head_stride, lse_token_stride;

  Index block_tables;          // row s starts at s * block_table_stride; column stride is Index::stride
  int64_t block_table_stride;  // elements
  Index seq_lens;              // [num_seqs]
  Index cu_query_lens;         // [num_seqs + 1]; data null: one query token for each sequence
  const float* alibi_slopes;   // [num_heads], contiguous, or null
  const float* sinks;          // [num_heads], contiguous, or null: one more logit in each softmax, without a value
  Scale k_scale, v_scale;      // a scale or one for each KV head; stored = value / scale; 1 for kSame

  int64_t num_tokens;  // rows of query; rows beyond cu_query_lens[num_seqs] are left untouched
  int64_t num_seqs, num_blocks, max_blocks_per_seq;
  int64_t max_seq_len;  // lengths are clamped to it (and reported); at most max_blocks_per_seq * block_size
  int num_heads, num_kv_heads, head_size, block_size;

  float scale;
  float softcap;              // 0: none.  logit = softcap * tanh(scale * q.k / softcap), before ALiBi
  int64_t window;             // 0: none.  keys j with |position - j| < window
  bool causal;                // keys j <= position
  float denominator_epsilon;  // 1e-6 for v1 and v2, 0 for paged_attention
  bool batch_invariant;       // a query's result depends on nothing but itself, its keys and the options
  BlockSparse sparse;         // vert_stride <= 1: dense

  void* workspace;  // CUDA alone; null: from the stream-ordered pool
  int64_t workspace_size;
};

// Order of one logit: x = scale * q.k; softcap; + slope * (j - position); masks; sinks join the softmax.
// A row that attends to nothing (seq_len 0, a position below 0) gives 0 and lse = -inf (or its sink).
// Out-of-range block ids and lengths are masked or clamped and reported; nothing outside the arrays is read.
PYKV_CPU_TWIN_OF_PRODUCTS(paged_attention_cpu, PagedAttentionArgs)
void paged_attention_cuda(const PagedAttentionArgs& args, const Launch& launch);

// Bytes of workspace that paged_attention_cuda wants on `device`: closed form, no array is read.
int64_t paged_attention_workspace_cuda(int64_t num_tokens, int64_t num_seqs, int num_heads, int num_kv_heads,
                                       int head_size, bool batch_invariant, int device);

}  // namespace pykv
