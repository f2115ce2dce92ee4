/* Attention over a paged KV cache.
 *
 * Layouts of the caches, NB blocks of BS tokens, x = 16 bytes / element size:
 *   flash   key_cache and value_cache [NB, BS, num_kv_heads, head_size], innermost contiguous; NHD, or HND by strides
 *   packed  key_cache [NB, num_kv_heads, head_size / x, BS, x], value_cache [NB, num_kv_heads, head_size, BS]
 * told apart by the number of dimensions of key_cache (4 or 5); all strides but the innermost are free.
 *
 * kv_cache_dtype: "auto" (or "float16", "bfloat16", "float32"): the cache has the dtype of query.  "fp8", "fp8_e4m3",
 * "fp8_e5m2", "int8": one-byte elements (uint8 or that type), value = element * k_scale or v_scale.  "nvfp4": uint8
 * [NB, BS, num_kv_heads, head_size / 2 + head_size / 16], as reshape_and_cache_flash writes it, pages compact,
 * NHD or HND by strides, with k_scale and v_scale the global scales; head_size a multiple of 64, BS of 4.
 * k_scale, v_scale: float32, one element or one for each KV head, on the host or on the device; NULL means 1.
 *
 * Query head h reads KV head h / (num_heads / num_kv_heads).  Sums and the softmax are in float32.
 *
 * Out of range: a block id outside the cache masks its tokens; a length outside [0, limit], where limit is what the row of
 * block_tables can hold, is clamped.  Both are reported (pykv/base.h).
 *
 * Example, a query of one sequence, whose three tokens lie in block 1, on the host:
 *
 *   float q[1][4][8] = {{{1}}}, y[1][4][8], keys[2][4][2][8] = {{{{0}}}}, values[2][4][2][8] = {{{{0}}}};
 *   int32_t table[] = {1}, lens[] = {3};
 *   int64_t of_query[] = {1, 4, 8}, of_cache[] = {2, 4, 2, 8}, of_table[] = {1, 1}, of_lens[] = {1};
 *   DLTensor query = {q, {kDLCPU, 0}, 3, {kDLFloat, 32, 1}, of_query, NULL, 0}, out = query;
 *   DLTensor key_cache = {keys, {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, of_cache, NULL, 0}, value_cache = key_cache;
 *   DLTensor block_tables = {table, {kDLCPU, 0}, 2, {kDLInt, 32, 1}, of_table, NULL, 0};
 *   DLTensor seq_lens = {lens, {kDLCPU, 0}, 1, {kDLInt, 32, 1}, of_lens, NULL, 0};
 *   out.data = y;
 *   value_cache.data = values;
 *   if (pykv_paged_attention(&out, &query, &key_cache, &value_cache, &block_tables, &seq_lens, NULL, NULL) !=
 *       PYKV_OK)
 *     puts(pykv_last_error());
 */
#ifndef PYKV_ATTENTION_H_
#define PYKV_ATTENTION_H_

#include <math.h>
#include <pykv/base.h>

/* What pykv_paged_attention is told beside the arrays that it always needs.  Start from PYKV_PAGED_ATTENTION_OPTIONS, which
 * has NULL, NAN, true, 0, "auto" and false, and set what is to be otherwise:
 *
 *   pykv_paged_attention_options options = PYKV_PAGED_ATTENTION_OPTIONS;
 *   options.window = 4096;
 *
 *   struct_size     sizeof(pykv_paged_attention_options): by it the library knows which fields the program has.  New ones
 *                   come at the end
 *   cu_query_lens   [num_seqs + 1] int32 | int64: queries of s are rows cu[s] .. cu[s + 1] - 1; NULL: one query for each
 *                   sequence.  Rows of no sequence are not written
 *   scale           of q.k; NAN: 1 / sqrt(head_size)
 *   causal          the query at position p sees keys j <= p; its position is seq_len - query_len + its row
 *   window          > 0: it sees keys with |p - j| < window; 0: all
 *   softcap         > 0: logits become softcap * tanh(logit / softcap); 0 and infinity: no change
 *   alibi_slopes    [num_heads] f32, contiguous, or NULL: + slope * (j - p)
 *   sinks           [num_heads] f32, contiguous, or NULL: one more logit in each softmax, without a value
 *   kv_cache_dtype, k_scale, v_scale                     see above
 *   batch_invariant the result of a query depends, to the last bit, on itself, on the keys that it sees and on the options
 *                   alone: not on the rest of the batch, nor on how many queries its sequence has in this call.  Rows of
 *                   block_tables may then hold 2^23 tokens at most
 *   lse             [num_heads, num_tokens] f32 or NULL: written with the natural log of the softmax denominator
 *                   (sinks included); -inf where nothing is seen, and out is 0 there; NaN, as out is, where NaN or +inf is
 *                   among the logits that the row sees
 *   workspace       contiguous bytes (uint8), at least pykv_paged_attention_workspace_size, 256-byte aligned; NULL: CUDA
 *                   takes it from the stream-ordered pool.  Not used on the CPU */
typedef struct pykv_paged_attention_options {
  size_t struct_size;
  const DLTensor* cu_query_lens;
  double scale;
  bool causal;
  int64_t window;
  double softcap;
  const DLTensor* alibi_slopes;
  const DLTensor* sinks;
  const char* kv_cache_dtype;
  const DLTensor* k_scale;
  const DLTensor* v_scale;
  bool batch_invariant;
  DLTensor* lse;
  DLTensor* workspace;
} pykv_paged_attention_options;

#define PYKV_PAGED_ATTENTION_OPTIONS \
  {sizeof(pykv_paged_attention_options), NULL, NAN, true, 0, 0, NULL, NULL, "auto", NULL, NULL, false, NULL, NULL}

/* Prefill, chunked prefill and decode in one batch: the queries of sequence s are its last tokens.
 *
 *   out, query      [num_tokens, num_heads, head_size]   f32 | f16 | bf16, innermost contiguous; out is written
 *   key_cache, value_cache                               see above
 *   block_tables    [num_seqs, max_blocks_per_seq]       int32 | int64: the blocks of each sequence, in order
 *   seq_lens        [num_seqs]                           int32 | int64: length with the queries included
 *   options         NULL: PYKV_PAGED_ATTENTION_OPTIONS, that is one query for each sequence, which sees all before it */
PYKV_API pykv_status pykv_paged_attention(DLTensor* out, const DLTensor* query, const DLTensor* key_cache,
                                          const DLTensor* value_cache, const DLTensor* block_tables,
                                          const DLTensor* seq_lens, const pykv_paged_attention_options* options,
                                          void* stream);

/* Bytes of workspace that pykv_paged_attention wants on CUDA device `device_id` for batches of up to these sizes: a closed
 * formula, independent of lengths: a few megabytes, some tens of them with batch_invariant.  Written to *size. */
PYKV_API pykv_status pykv_paged_attention_workspace_size(int64_t num_tokens, int64_t num_seqs, int64_t num_heads,
                                                         int64_t num_kv_heads, int64_t head_size, bool batch_invariant,
                                                         int32_t device_id, int64_t* size);

/* Which kernels calls of pykv_paged_attention, _v1 and _v2 launch.
 *
 * pykv_paged_attention_plan() describes the last such call of this thread that passed its checks: a line for each launch
 * ("decode_cluster<128, 8>: grid 64, threads 256, cluster 8, shared memory 213184": the head size and the rows of its tiles), and
 * the bytes of workspace.  For people: it may change between versions.  The text holds until this thread asks again.
 * After pykv_paged_attention_only_plan(true) calls of this thread are checked and planned, and launch and compute nothing.
 * After pykv_paged_attention_plan_for("H100") the same, for that device instead of the arrays', which need not exist: "A100",
 * "H100" or "H200"; NULL: for that of the arrays again.
 * pykv_paged_attention_kernel(0), (1), ... are the names of all kernels; NULL past the last. */
PYKV_API const char* pykv_paged_attention_plan(void);
PYKV_API void pykv_paged_attention_only_plan(bool on);
PYKV_API pykv_status pykv_paged_attention_plan_for(const char* device);
PYKV_API const char* pykv_paged_attention_kernel(int32_t id);

/* vLLM's decode attention: one query for each sequence.  The softmax denominator is sum + 1e-6, as there.
 *
 *   out, query    [num_seqs, num_heads, head_size]
 *   num_kv_heads, block_size   must agree with the caches
 *   max_seq_len   an upper bound of seq_lens; a longer length is clamped to it and reported
 *   alibi_slopes  [num_heads] f32, contiguous, or NULL
 *   blocksparse_vert_stride > 1 turns on block-sparse attention: with kb = the sparsity block (of blocksparse_block_size
 *     tokens, a multiple of the block size) that a cache block starts in, qb = (seq_len - 1) / blocksparse_block_size,
 *     step = blocksparse_head_sliding_step and
 *       offset = (tp_rank * num_heads + head) * step + 1           if step >= 0
 *              = (tp_rank * num_kv_heads + kv_head) * -step + 1    otherwise,
 *     a cache block is seen if (kb + offset) % vert_stride == 0 or kb > qb - blocksparse_local_blocks.  A tp_rank or a step
 *     with which an offset might not fit into 64 bits is PYKV_VALUE_ERROR; both may be negative */
PYKV_API pykv_status pykv_paged_attention_v1(DLTensor* out, const DLTensor* query, const DLTensor* key_cache,
                                             const DLTensor* value_cache, int64_t num_kv_heads, double scale,
                                             const DLTensor* block_tables, const DLTensor* seq_lens, int64_t block_size,
                                             int64_t max_seq_len, const DLTensor* alibi_slopes,
                                             const char* kv_cache_dtype, const DLTensor* k_scale,
                                             const DLTensor* v_scale, int64_t tp_rank, int64_t blocksparse_local_blocks,
                                             int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                                             int64_t blocksparse_head_sliding_step, void* stream);

/* The same with the scratch arrays of vLLM's signature, P = ceil(max_seq_len / 512):
 *   exp_sum, max_logits  [num_seqs, num_heads, P] f32        tmp_out  [num_seqs, num_heads, P, head_size] like out
 * They are checked, and what they hold after the call is not specified: the work is split as pykv_paged_attention does. */
PYKV_API pykv_status pykv_paged_attention_v2(DLTensor* out, DLTensor* exp_sum, DLTensor* max_logits, DLTensor* tmp_out,
                                             const DLTensor* query, const DLTensor* key_cache,
                                             const DLTensor* value_cache, int64_t num_kv_heads, double scale,
                                             const DLTensor* block_tables, const DLTensor* seq_lens, int64_t block_size,
                                             int64_t max_seq_len, const DLTensor* alibi_slopes,
                                             const char* kv_cache_dtype, const DLTensor* k_scale,
                                             const DLTensor* v_scale, int64_t tp_rank, int64_t blocksparse_local_blocks,
                                             int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                                             int64_t blocksparse_head_sliding_step, void* stream);

/* Merges two partial attentions over disjoint sets of keys (arXiv:2501.01005, section 2.2).
 *
 *   output                        [num_tokens, num_heads, head_size]; may be prefix_output or suffix_output
 *   prefix_output, suffix_output  [num_tokens, num_heads, head_size]  f32 | f16 | bf16
 *   prefix_lse, suffix_lse        [num_heads, num_tokens] f32, natural log, any strides; +inf and -inf mean that nothing was
 *                                 seen, NaN makes output and output_lse NaN
 *   output_lse                    the same, written; or NULL
 *   prefill_tokens_with_context   tokens from here on copy the suffix; -1: none does
 *   output_scale                  f32, 1 element, or NULL.  With it output is float8_e4m3fn (or uint8): value / scale
 *
 * Where both sides are empty the prefix is copied and output_lse is -inf. */
PYKV_API pykv_status pykv_merge_attn_states(DLTensor* output, const DLTensor* prefix_output, const DLTensor* prefix_lse,
                                            const DLTensor* suffix_output, const DLTensor* suffix_lse,
                                            DLTensor* output_lse, int64_t prefill_tokens_with_context,
                                            const DLTensor* output_scale, void* stream);

/* Merges any number of partial attentions over disjoint sets of keys, stacked in one array.
 *
 *   output           [num_tokens, num_heads, head_size]; may be one of the parts
 *   partial_outputs  [num_parts, num_tokens, num_heads, head_size]  f32 | f16 | bf16
 *   partial_lses     [num_parts, num_heads, num_tokens] f32, natural log; +inf and -inf mean that nothing was seen
 *   output_lse       [num_heads, num_tokens] f32, written; or NULL; may be one of partial_lses
 *   output_scale     f32, 1 element, or NULL.  With it output is float8_e4m3fn (or uint8): value / scale.  Without it
 *                    output has the dtype of the parts or, if that is f32, any of the three
 *
 * A part that saw nothing may hold anything.  Where no part saw anything (or there is none): 0, and output_lse is -inf. */
PYKV_API pykv_status pykv_merge_attn_states_n(DLTensor* output, const DLTensor* partial_outputs,
                                              const DLTensor* partial_lses, DLTensor* output_lse,
                                              const DLTensor* output_scale, void* stream);

#endif /* PYKV_ATTENTION_H_ */
