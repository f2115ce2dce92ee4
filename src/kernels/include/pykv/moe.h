/* pykv: mixture of experts. Which experts each token goes to, and the maps between tokens and experts.
 *
 * T tokens go to k of E experts each; pair t * k + j is token t at its j-th expert.  All strides are the caller's choice
 * where nothing else is said.  An id of an expert that is negative stands for none: its pair is dropped.  One that is E or
 * more is dropped, too, and reported.
 *
 * Example, the best two of eight experts for three tokens on the host:
 *
 *   float logits[3][8] = {{1, 3, 2}}, weights[3][2];
 *   int32_t ids[3][2];
 *   int64_t of_logits[] = {3, 8}, of_choices[] = {3, 2};
 *   DLTensor gating_output = {logits, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_logits, NULL, 0};
 *   DLTensor topk_weights = {weights, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_choices, NULL, 0};
 *   DLTensor topk_ids = {ids, {kDLCPU, 0}, 2, {kDLInt, 32, 1}, of_choices, NULL, 0};
 *   if (pykv_topk_softmax(&topk_weights, &topk_ids, NULL, &gating_output, true, NULL, NULL, NULL) != PYKV_OK)
 *     puts(pykv_last_error());
 */
#ifndef PYKV_MOE_H_
#define PYKV_MOE_H_

#include "pykv/base.h"

/* The k experts with the largest p + bias, p = softmax(gating_output) in fp32, and their p; of equal sums the lower id comes
 * first.  p that is not finite counts as 0: a row with a NaN gets experts 0 ... k - 1 and weights of 0 (without a bias).
 *   topk_weights             [T, k]  float32; written: p, divided by the sum of the k if renormalize (and that is not 0)
 *   topk_ids                 [T, k]  int32 | uint32 | int64; written
 *   token_expert_indices     [T, k]  int32; written: j * T + t; may be NULL
 *   gating_output            [T, E]  float32 | float16 | bfloat16, E <= 1024, k <= E
 *   e_score_correction_bias  [E]     float32 | float16 | bfloat16; may be NULL
 *   is_padding               [T]     bool | uint8: a token for which it is not 0 gets ids of -1 and weights of 0; may be NULL */
PYKV_API pykv_status pykv_topk_softmax(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                                       const DLTensor* gating_output, bool renormalize,
                                       const DLTensor* e_score_correction_bias, const DLTensor* is_padding,
                                       void* stream);

/* The same with p = 1 / (1 + exp(-x)), NaN counting as 0.  The weights are multiplied by routed_scaling_factor at last. */
PYKV_API pykv_status pykv_topk_sigmoid(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                                       const DLTensor* gating_output, bool renormalize,
                                       const DLTensor* e_score_correction_bias, double routed_scaling_factor,
                                       const DLTensor* is_padding, void* stream);

/* The same with p = sqrt(log(1 + exp(x))), sqrt(x) above 20.  With hash_indices_table the experts of token t are
 * hash_indices_table[input_ids[t]], whatever their p, and token_expert_indices is not written.  Tokens of images, whose ids
 * are image_sentinel_lo ... image_sentinel_lo + 4, are not looked up: bias_vl chooses their experts, and no other bias.
 *   input_ids           [T]              int32 | int64; required beside one of the next two, else NULL.  An id outside the table
 *                                        is reported, and its token gets ids of -1 and weights of 0, unless it is padding
 *   hash_indices_table  [vocab_size, k]  int32 or int64; an expert outside [0, E) is reported, and becomes -1 with weight 0;
 *                                        may be NULL
 *   bias_vl             [E]              float32 | float16 | bfloat16; may be NULL: there are no tokens of images
 *   image_sentinel_lo                    0 or less: there are none */
PYKV_API pykv_status pykv_topk_softplus_sqrt(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                                             const DLTensor* gating_output, bool renormalize,
                                             double routed_scaling_factor, const DLTensor* e_score_correction_bias,
                                             const DLTensor* input_ids, const DLTensor* hash_indices_table,
                                             const DLTensor* is_padding, const DLTensor* bias_vl,
                                             int64_t image_sentinel_lo, void* stream);

/* The topk experts with the largest s + bias among those of the topk_group best of n_group groups of E / n_group neighbours,
 * and their s, in fp32; of equal sums the lower group and the lower id come first.
 *   topk_weights  [T, topk]  float32; written: s, divided by their sum + 1e-20 if renormalize, times routed_scaling_factor
 *   topk_ids      [T, topk]  int32 | uint32 | int64; written
 *   scores        [T, E]     float32 | float16 | bfloat16, E <= 1024
 *   n_group       1 to 32, divides E
 *   topk          at most topk_group * E / n_group
 *   bias          [E]        float32 | float16 | bfloat16; may be NULL
 *   scoring_func  s: 0: scores, 1: 1 / (1 + exp(-scores)), 2: softmax(scores)
 *   group_score   of a group: "top2_sum": the sum of its two largest s + bias; "max": the largest
 *   is_padding    as above; may be NULL
 * An expert whose score is NaN or infinite comes after all others (softmax: as in pykv_topk_softmax).  Where the groups that
 * are kept have too few others, the lowest ids of the rest are taken, with weight 0. */
PYKV_API pykv_status pykv_grouped_topk(DLTensor* topk_weights, DLTensor* topk_ids, const DLTensor* scores,
                                       int64_t n_group, int64_t topk_group, int64_t topk, bool renormalize,
                                       double routed_scaling_factor, const DLTensor* bias, int64_t scoring_func,
                                       const char* group_score, const DLTensor* is_padding, void* stream);

/* Groups the pairs of tokens and experts by expert, each group padded to a multiple of block_size, so that a tiled GEMM has one
 * expert in each tile.  In a group pairs ascend: the result is the same in every run.
 *   topk_ids             [T, k]      int32 | uint32 | int64; pairs of negative ids are dropped, of ids from num_experts on too,
 *                                    and these are reported
 *   sorted_token_ids     [capacity]  int32, contiguous; written: pairs, and T * k in all other places.  capacity is at least
 *                                    T * k + min(T * k, num_experts) * (block_size - 1)
 *   experts_ids          [blocks]    int32, contiguous; written: the expert of each block of places, -1 behind the last.
 *                                    blocks is at least the least capacity / block_size
 *   num_tokens_post_pad  [1]         int32; written: places that are taken, padding included
 *   expert_map           [num_experts]  int32 | int64: from ids to ids of this rank, less than num_experts; negative: the expert
 *                                    lies elsewhere, and its pairs are dropped; may be NULL
 *   scatter_idx          T * k elements  int32, contiguous; written: the place of each pair, -1 if it is dropped; may be NULL */
PYKV_API pykv_status pykv_moe_align_block_size(const DLTensor* topk_ids, int64_t num_experts, int64_t block_size,
                                               DLTensor* sorted_token_ids, DLTensor* experts_ids,
                                               DLTensor* num_tokens_post_pad, const DLTensor* expert_map,
                                               DLTensor* scatter_idx, void* stream);

/* The same for rows that are grouped by expert already: expert b has the rows b * max_tokens_per_batch + i,
 * i = 0 ... expert_num_tokens[b] - 1.
 *   expert_num_tokens    [num_experts]  int32 | int64; clamped to 0 ... max_tokens_per_batch, and reported if beyond
 *   sorted_token_ids     [capacity]  int32, contiguous; written: rows, and num_experts * max_tokens_per_batch in all other
 *                                    places; capacity is at least num_experts times max_tokens_per_batch, rounded up to a
 *                                    multiple of block_size
 *   experts_ids, num_tokens_post_pad  as above */
PYKV_API pykv_status pykv_batched_moe_align_block_size(int64_t max_tokens_per_batch, int64_t block_size,
                                                       const DLTensor* expert_num_tokens, DLTensor* sorted_token_ids,
                                                       DLTensor* experts_ids, DLTensor* num_tokens_post_pad,
                                                       void* stream);

/* pykv_moe_align_block_size for each LoRA adapter l that is listed and enabled, of the pairs of its tokens; row l of the outputs.
 * The rows of others are not written.
 *   topk_ids, expert_map  as there
 *   token_lora_mapping    [T]                 int32 | int64: the adapter of each token
 *   sorted_token_ids      [max_loras, max_num_tokens_padded]  int32, contiguous, in any shape of as many elements; written
 *   experts_ids           [max_loras, max_num_m_blocks]       the same
 *   num_tokens_post_pad   [max_loras]         int32; written
 *   adapter_enabled       [>= max_loras]      int32 | int64: 0: not
 *   lora_ids              [any]               int32 | int64: adapters; negative ones are skipped, so are those from max_loras
 *                                             on, and reported
 *   max_num_tokens_padded, max_num_m_blocks   at least what capacity and blocks have to be there */
PYKV_API pykv_status pykv_moe_lora_align_block_size(const DLTensor* topk_ids, const DLTensor* token_lora_mapping,
                                                    int64_t num_experts, int64_t block_size, int64_t max_loras,
                                                    int64_t max_num_tokens_padded, int64_t max_num_m_blocks,
                                                    DLTensor* sorted_token_ids, DLTensor* experts_ids,
                                                    DLTensor* num_tokens_post_pad, const DLTensor* adapter_enabled,
                                                    const DLTensor* lora_ids, const DLTensor* expert_map, void* stream);

/* What two grouped GEMMs need: rows of an expert side by side, their number m, and the problems (m, 2 n, k) and (m, k, n), with n
 * for 2 n unless is_gated.  In an expert pairs ascend.  All outputs are int32 and contiguous; those of pairs that are dropped are
 * the last of input_permutation, which are not written.
 *   topk_ids            [T, topk]            as in pykv_moe_align_block_size
 *   expert_offsets      [num_experts + 1]    written: where the rows of each expert begin
 *   problem_sizes1, 2   [num_experts, 3]     written; m and the next number change places without blockscale_offsets and with
 *                                            T * topk <= 64
 *   input_permutation   [T * topk]           written: the token of each row
 *   output_permutation  [T * topk]           written: the row of each pair, T if it is dropped
 *   blockscale_offsets  [num_experts + 1]    written: as expert_offsets, had experts multiples of 128 rows; may be NULL */
PYKV_API pykv_status pykv_get_cutlass_moe_mm_data(const DLTensor* topk_ids, DLTensor* expert_offsets,
                                                  DLTensor* problem_sizes1, DLTensor* problem_sizes2,
                                                  DLTensor* input_permutation, DLTensor* output_permutation,
                                                  int64_t num_experts, int64_t n, int64_t k,
                                                  DLTensor* blockscale_offsets, bool is_gated, void* stream);

/* The problems (m, 2 n, k) and (m, k, n) of each expert from where its rows begin.
 *   expert_first_token_offset  [num_experts + 1]  int32 | int64, ascending
 *   problem_sizes1, 2          [num_experts, 3]   int32, contiguous; written
 *   swap_ab                    m and the next number change places */
PYKV_API pykv_status pykv_get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    const DLTensor* expert_first_token_offset, DLTensor* problem_sizes1, DLTensor* problem_sizes2, int64_t n, int64_t k,
    bool swap_ab, void* stream);

/* The same for experts of padded_m rows each, of which expert_num_tokens count.
 *   expert_offsets     [num_local_experts] or one more  int32, contiguous; written: e * padded_m
 *   problem_sizes1, 2  [num_local_experts, 3]           int32, contiguous; written
 *   expert_num_tokens  [num_local_experts]              int32 | int64 */
PYKV_API pykv_status pykv_get_cutlass_batched_moe_mm_data(DLTensor* expert_offsets, DLTensor* problem_sizes1,
                                                          DLTensor* problem_sizes2, const DLTensor* expert_num_tokens,
                                                          int64_t num_local_experts, int64_t padded_m, int64_t n,
                                                          int64_t k, void* stream);

/* Sorts the rows of tokens by expert: row i of the result is that of a pair's token, pairs of local expert 0 first; those of an
 * expert ascend.  Rows of pairs that are dropped, and of those whose expert lies elsewhere, are not written.
 *   input                      [T, D]   any dtype
 *   topk_ids                   [T, topk]  as in pykv_moe_align_block_size
 *   token_expert_indices       not looked at; may be NULL
 *   expert_map                 [n_expert]  int32 | int64: from ids to ids of this rank, less than n_local_expert; negative: the
 *                              expert lies elsewhere; may be NULL, where n_local_expert = n_expert
 *   permuted_input             [T * topk, D]  dtype of input; written
 *   expert_first_token_offset  [n_local_expert + 1]  int64 | int32, contiguous; written: where the rows of each expert begin
 *   inv_permuted_idx           [T, topk]  int32, contiguous; written: the place of each pair.  Behind the rows of this rank are
 *                              first the pairs of other experts, by id, and then those that are dropped
 *   permuted_idx               [T * topk]  int32, contiguous; written: the pair of each row, T * topk behind the rows */
PYKV_API pykv_status pykv_moe_permute(const DLTensor* input, const DLTensor* topk_ids,
                                      const DLTensor* token_expert_indices, const DLTensor* expert_map,
                                      int64_t n_expert, int64_t n_local_expert, int64_t topk, DLTensor* permuted_input,
                                      DLTensor* expert_first_token_offset, DLTensor* inv_permuted_idx,
                                      DLTensor* permuted_idx, void* stream);

/* hidden_states[t] = the sum of topk_weights[t, j] * permuted_hidden_states[inv_permuted_idx[t, j]] over j, in fp32 and in this
 * order, rounded once.
 *   permuted_hidden_states     [num_rows, D]  float32 | float16 | bfloat16
 *   topk_weights               [T, topk]  float32
 *   inv_permuted_idx           [T, topk] or [T * topk]  int32 | int64; negative: no row; from num_rows on: none, and reported
 *   expert_first_token_offset  [any]      int64 | int32: there is no row from its last number on; may be NULL
 *   hidden_states              [T, D]     dtype of permuted_hidden_states; written */
PYKV_API pykv_status pykv_moe_unpermute(const DLTensor* permuted_hidden_states, const DLTensor* topk_weights,
                                        const DLTensor* inv_permuted_idx, const DLTensor* expert_first_token_offset,
                                        int64_t topk, DLTensor* hidden_states, void* stream);

/* output[t] = the sum of input[t, j] over j, in fp32 and in this order, rounded once.
 *   input       [T, k, D]  float32 | float16 | bfloat16
 *   output      [T, D]     dtype of input; written
 *   topk_ids    [T, k]     int32 | uint32 | int64: input[t, j] is not read where this is negative; may be NULL
 *   expert_map  [E]        int32 | int64: nor where expert_map[topk_ids[t, j]] is; ids from E on count as negative and are
 *                          reported; may be NULL */
PYKV_API pykv_status pykv_moe_sum(const DLTensor* input, DLTensor* output, const DLTensor* topk_ids,
                                  const DLTensor* expert_map, void* stream);

/* output_tensor[i] = input_tensor[dst2src_map[i]], byte by byte.
 *   input_tensor   [num_sources, D]  any dtype
 *   dst2src_map    [num_rows]        int32 | int64; where it is negative the row becomes zeros, and from num_sources on, too,
 *                                    which is reported
 *   output_tensor  [num_rows, D]     dtype of input_tensor; written */
PYKV_API pykv_status pykv_shuffle_rows(const DLTensor* input_tensor, const DLTensor* dst2src_map,
                                       DLTensor* output_tensor, void* stream);

/* A layer of experts: out[t] = the sum of topk_weights[t, j] * (activation(x[t] w1[e]^T + w1_bias[e]) w2[e]^T + w2_bias[e])
 * over j, e = topk_ids[t, j], in fp32, in this order, and rounded once; what lies between the products and the sum is rounded to
 * the dtype of x.  A row of out has the same bits whatever the other tokens are.  Experts without tokens cost nothing.  Nothing is
 * waited for on the host.  N = rows of w1: 2 * I where the activation is a product of two halves, else I.
 *   out           [T, D]     dtype of x; written; shares no memory with the others
 *   x             [T, D]     float16 | bfloat16; the elements of a row lie side by side
 *   w1            [E, N, D]  dtype of x, rows side by side; or, with w1_format, [E, bytes] uint8: packed weights of this format
 *                            (pykv_packed_gemm), aligned to 16 bytes
 *   w2            [E, D, I]  the same, with w2_format
 *   topk_weights  [T, k]     float32
 *   topk_ids      [T, k]     int32 | uint32 | int64; negative: none.  From E on (or the size of expert_map): none, and reported
 *   activation    one of pykv_masked_moe_activation, with its numbers
 *   w1_bias       [E, N]     dtype of x; may be NULL
 *   w2_bias       [E, D]     dtype of x; may be NULL
 *   expert_map    [any]      int32 | int64: from ids to experts of w1 and w2; negative: it is not here, and its pairs are left out;
 *                            may be NULL
 *   w1_format, w2_format     "": w1 and w2 are numbers
 *   apply_router_weight_on_input  the results of the first product are multiplied by topk_weights, and not those of the second
 *   workspace     [bytes]    uint8, contiguous, aligned to 16 bytes; NULL: CUDA takes it from the stream-ordered pool, the CPU
 *                            from the heap.  For P = T * k pairs and B = min(P, E) it has the bytes, each rounded up to 256, of
 *                            4 (P + 143 B), 4 (P + B), 4, 4 P, 2 P max(N, D) and 2 P I
 * With w1_scale and w2_scale both products are those of 8-bit codes: rows of x, and those of the activation, become codes, too.
 * w1 and w2 are then float8_e4m3fn | uint8 (its bytes) | int8, of the same kind and with at most 512 experts.
 *   w1_scale      [E, ceil(N / 128), D / 128] float32: of blocks of w1; rows become codes in groups of 128 with a scale each.  Or
 *                 [E, N] or [E, N, 1] of rows, or [E] or [E, 1] of experts; rows become codes with one scale each
 *   w2_scale      [E, ceil(D / 128), I / 128], [E, D], ... likewise
 *   a1_scale      [1]        float32: the scale of x instead, not with blocks; may be NULL
 *   a2_scale      [1]        float32: that of what the activation gives; may be NULL
 * apply_router_weight_on_input multiplies the scales of rows of x; w1_bias must be NULL beside it.  For R(n) = n and 4 max(1, ceil(n / 128)), each rounded up to 16,
 * together, workspace has the bytes, each rounded up to 256, of 4 (E + 1), 4 P, 4 P, 4, T R(D), P R(D), 2 P max(N, D), 2 P I and
 * P R(I). */
PYKV_API pykv_status pykv_fused_moe(DLTensor* out, const DLTensor* x, const DLTensor* w1, const DLTensor* w2,
                                    const DLTensor* topk_weights, const DLTensor* topk_ids, const char* activation,
                                    const DLTensor* w1_bias, const DLTensor* w2_bias, const DLTensor* expert_map,
                                    const char* w1_format, const char* w2_format, bool apply_router_weight_on_input,
                                    double clamp_limit, double alpha, double beta, double situ_beta,
                                    double situ_linear_beta, const DLTensor* w1_scale, const DLTensor* w2_scale,
                                    const DLTensor* a1_scale, const DLTensor* a2_scale, DLTensor* workspace,
                                    void* stream);

/* One product of such a layer, by a map that pykv_moe_align_block_size makes: out[p] = (x[p / top_k] w[e]^T + bias[e]) *
 * topk_weights[p], in fp32 and rounded once, for the pairs p of each block and its expert e.  Other rows of out stay.
 *   out                  [T * top_k, N]  dtype of x; written; shares no memory with the others
 *   x                    [T, K]          float16 | bfloat16; the elements of a row lie side by side
 *   w                    [E, N, K]       dtype of x, rows side by side; or, with format, [E, bytes] uint8
 *   topk_weights         T * top_k elements  float32, contiguous; NULL: 1
 *   sorted_token_ids     [capacity]      int32, contiguous: pairs; those outside [0, T * top_k) are none
 *   experts_ids          [blocks]        int32, contiguous: of each block; outside [0, E): nothing is done for its pairs
 *   num_tokens_post_pad  [1]             int32: places of sorted_token_ids that count
 *   block_size           places of a block, a multiple of 8
 *   bias                 [E, N]          dtype of x; may be NULL
 *   format               of packed weights; "": w holds numbers */
PYKV_API pykv_status pykv_fused_moe_gemm(DLTensor* out, const DLTensor* x, const DLTensor* w,
                                         const DLTensor* topk_weights, const DLTensor* sorted_token_ids,
                                         const DLTensor* experts_ids, const DLTensor* num_tokens_post_pad,
                                         int64_t top_k, int64_t block_size, const DLTensor* bias, const char* format,
                                         void* stream);

#endif /* PYKV_MOE_H_ */
