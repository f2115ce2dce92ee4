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

/* The same with p = sqrt(log(1 + exp(x))), sqrt(x) above 20.  With input_ids and hash_indices_table (both or none) the
 * experts of token t are hash_indices_table[input_ids[t]], whatever their p, and token_expert_indices is not written.
 *   input_ids           [T]              int32 | int64; one outside the table is reported, and its token gets ids of -1 and
 *                                        weights of 0, unless it is padding
 *   hash_indices_table  [vocab_size, k]  dtype of topk_ids; an expert outside [0, E) is reported, and becomes -1 with weight 0 */
PYKV_API pykv_status pykv_topk_softplus_sqrt(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                                             const DLTensor* gating_output, bool renormalize,
                                             double routed_scaling_factor, const DLTensor* e_score_correction_bias,
                                             const DLTensor* input_ids, const DLTensor* hash_indices_table,
                                             const DLTensor* is_padding, void* stream);

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

#endif /* PYKV_MOE_H_ */
