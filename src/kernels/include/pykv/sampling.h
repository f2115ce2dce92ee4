/* pykv: sampling. From logits to tokens.
 *
 * A row holds the logits of one request, one for each token of the vocabulary; its elements lie side by side (stride 1), rows
 * at any stride.  Logits are ordered by value, equal ones by their index, the lower one first; -0 equals 0, and NaN comes before
 * everything.  This order is total, so a set of the first k has exactly k members and is the same on every device.
 *
 * Example, the three largest of each of two rows on the host:
 *
 *   float x[2][8] = {{1, 5, 2}, {7}};
 *   int32_t found[2][3];
 *   int64_t of_x[] = {2, 8}, of_found[] = {2, 3};
 *   DLTensor logits = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_x, NULL, 0};
 *   DLTensor indices = {found, {kDLCPU, 0}, 2, {kDLInt, 32, 1}, of_found, NULL, 0};
 *   if (pykv_top_k_per_row(&indices, &logits, 3, NULL, NULL, NULL, 0, false, NULL, NULL) != PYKV_OK)
 *     puts(pykv_last_error());
 */
#ifndef PYKV_SAMPLING_H_
#define PYKV_SAMPLING_H_

#include "pykv/base.h"

/* Where a token is in one of the masks: logits = logits > 0 ? logits / p : logits * p, with p = repetition_penalties[row].  In
 * fp32, rounded to the dtype; all other logits stay as they are.
 *   logits                [num_rows, vocab_size]  float32 | float16 | bfloat16; changed in place
 *   prompt_mask           [num_rows, vocab_size]  bool or uint8, nonzero: the token occurs; rows at any stride
 *   output_mask           [num_rows, vocab_size]  the same
 *   repetition_penalties  [num_rows]              dtype of logits, or float32  */
PYKV_API pykv_status pykv_apply_repetition_penalties_(DLTensor* logits, const DLTensor* prompt_mask,
                                                      const DLTensor* output_mask, const DLTensor* repetition_penalties,
                                                      void* stream);

/* Penalties of tokens in lists, in place.  Of tokens in either list, x = x > 0 ? x / repetition : x * repetition; of those in
 * output_token_ids, that are there count times, x = x - frequency * count - presence.  In fp32, rounded once to the dtype; all
 * other logits stay as they are.
 *   logits             [num_rows, vocab_size]  float32 | float16 | bfloat16; changed in place
 *   prompt_token_ids   [num_rows, length]      int32 or int64; NULL: none.  Ids below 0, and vocab_size, are padding; those
 *                      beyond it are reported
 *   output_token_ids   [num_rows, length]      the same, with a length of its own
 *   presence_penalties, frequency_penalties, repetition_penalties   float32: one, or one a row; NULL: 0, 0, 1
 *   prompt_lens        [num_rows]              int32 or int64: shorter lists; NULL: all of them.  Others than 0 ... length are
 *                      clamped and reported
 *   output_lens        [num_rows]              the same  */
PYKV_API pykv_status pykv_apply_penalties_(DLTensor* logits, const DLTensor* prompt_token_ids,
                                           const DLTensor* output_token_ids, const DLTensor* presence_penalties,
                                           const DLTensor* frequency_penalties, const DLTensor* repetition_penalties,
                                           const DLTensor* prompt_lens, const DLTensor* output_lens, void* stream);

/* The first min(k, n) of each row's n logits, in the order above: exactly so many different indices, then -1.
 *   indices     [num_rows, k]         int32; written.  Counted from the row's start
 *   logits      [num_rows, num_cols]  float32 | float16 | bfloat16
 *   k           1 ... 4096
 *   row_starts  [num_rows]            int32 or int64: the row's first column; NULL: 0
 *   row_ends    [num_rows]            int32 or int64: the column behind its last; NULL: num_cols.  Not below its start; 2-D, if
 *               compact, as [num_rows / n, n].  With next_n > 0, [num_rows / next_n]: tokens of sequences of which each has
 *               next_n rows; row r ends at row_ends[r / next_n] - next_n + r % next_n + 1
 *   row_k       [num_rows]            int32 or int64: fewer than k for some rows; NULL: k
 *   next_n      see row_ends; 0: one end a row
 *   sorted      true: indices in the order above; false: ascending indices
 *   values      [num_rows, k]         dtype of logits; written with the logits, -infinity behind them; NULL: not wanted
 * Starts and ends are clamped to the columns, row_k to 0 ... k, and reported; so is a row with NaN, unless it is taken whole.  */
PYKV_API pykv_status pykv_top_k_per_row(DLTensor* indices, const DLTensor* logits, int64_t k,
                                        const DLTensor* row_starts, const DLTensor* row_ends, const DLTensor* row_k,
                                        int64_t next_n, bool sorted, DLTensor* values, void* stream);

/* The first k of what several shards of a vocabulary found, in the order above; -1 behind the last.
 *   indices        [num_rows, k]              int32; written
 *   shard_indices  [num_shards, num_rows, n]  int32, negative: none.  Each list in order, as pykv_top_k_per_row gives it if
 *                  sorted; an entry that comes before its neighbour is reported, and the result is no merge then
 *   shard_values   [num_shards, num_rows, n]  float32 | float16 | bfloat16: the logits
 *   k              1 or more
 *   first_tokens   [num_shards]               int32 or int64: what is added to the indices of a shard; NULL: 0.  Sums that an
 *                  int32 does not hold, or that are negative, are reported and left out
 *   values         [num_rows, k]              dtype of shard_values; written with the logits, -infinity behind them; NULL: not
 *                  wanted  */
PYKV_API pykv_status pykv_merge_top_k(DLTensor* indices, const DLTensor* shard_indices, const DLTensor* shard_values,
                                      int64_t k, const DLTensor* first_tokens, DLTensor* values, void* stream);

/* What follows the product of a head, in place: logits = scale * soft_cap * tanh(logits / soft_cap) in fp32, rounded once, and
 * -infinity in columns that belong to no token.  These are, of num_org columns, then num_org_pad, then num_added and the rest:
 * the second ones and the rest (pykv/embedding.h has the same rows).
 *   logits    [num_rows, num_cols]  float32 | float16 | bfloat16; changed in place
 *   num_org   -1: num_cols
 *   soft_cap  0 or infinity: none  */
PYKV_API pykv_status pykv_finish_logits_(DLTensor* logits, int64_t num_org, int64_t num_org_pad, int64_t num_added,
                                         double soft_cap, double scale, void* stream);

/* One token for each row, drawn from softmax(logits / temperature) of those that are kept.  In this order:
 *   1. logits are changed: those that allowed_bitmap leaves out are -infinity; logit_bias is added; where a token is in
 *      prompt_bitmap or output_counts, x = x > 0 ? x / repetition : x * repetition; where it is in output_counts,
 *      x = x - frequency * count - presence
 *   2. kept are those with at least min_p times the largest probability, of these the first top_k, of these the shortest
 *      beginning whose share of the probability reaches top_p: at least one, in the order above
 *   3. the largest x / temperature + noise wins; with temperature < 1e-5, the first x
 * The noise of a token is a function of seed, step and token alone: -ln(e(v) / 16), where v is the first word of Philox4x32-10
 * for the key seed and the counter (token / 16, 2, step) and token % 16 is the first four bits of the second; for the others
 * -ln(e(v) / 16 + e(w)), where w is word token % 4 for the counter (token / 4, 0, step).  e(w) = -ln(1 - u), u = (w + 1/2) / 2^32.
 * (e(v) / 16 is the least of 16 exponentially distributed numbers.)  So the result depends neither on the rest of the batch nor
 * on the device.  -infinity is never drawn.
 *   out                 [num_rows]                    int32 or int64; written.  -1, reported: the row holds NaN, or nothing but
 *                       -infinity
 *   logits              [num_rows, vocab_size]        float32 | float16 | bfloat16, up to 2^23 of them
 *   seeds, steps        [num_rows]                    int32 or int64; NULL: 0
 *   temperature, top_p, min_p                         float32: one, or one a row; NULL: 1, 1, 0, which change nothing
 *   top_k               int32 or int64: one, or one a row; also one float32 on the host.  NULL, 0 or less: all
 *   repetition_penalty, frequency_penalty, presence_penalty   float32: one, or one a row; NULL: 1, 0, 0
 *   prompt_bitmap       [num_rows, vocab_size / 32, rounded up]  int32, a bit for each token, the lowest first; NULL: none
 *   output_counts       [num_rows, vocab_size]        int32: how often; NULL: never
 *   logit_bias          [num_rows, vocab_size]        float32, rows at any stride; NULL: none
 *   allowed_bitmap      like prompt_bitmap; NULL: all
 *   first_token         of the vocabulary, in logits that are a shard of it: tokens count from it
 *   logprobs            [num_rows]                    float32; written with the token's log-probability among those that are
 *                       kept (0 for the first x); NULL: not wanted
 *   scores              [num_rows]                    float32; written with what won: of several shards that is the token with the
 *                       largest, where nothing but temperatures, penalties, bias and bitmaps is asked for.  NULL: not wanted  */
PYKV_API pykv_status pykv_sample(DLTensor* out, const DLTensor* logits, const DLTensor* seeds, const DLTensor* steps,
                                 const DLTensor* temperature, const DLTensor* top_k, const DLTensor* top_p,
                                 const DLTensor* min_p, const DLTensor* repetition_penalty,
                                 const DLTensor* frequency_penalty, const DLTensor* presence_penalty,
                                 const DLTensor* prompt_bitmap, const DLTensor* output_counts,
                                 const DLTensor* logit_bias, const DLTensor* allowed_bitmap, int64_t first_token,
                                 DLTensor* logprobs, DLTensor* scores, void* stream);

/* out = softmax(logits / temperature), in fp32.
 *   out          [num_rows, vocab_size]  float32, or the dtype of logits, whose memory it then may be; written
 *   logits       [num_rows, vocab_size]  float32 | float16 | bfloat16, up to 2^23 of a row
 *   temperature  float32: one, or one a row, at least 1e-5; NULL: 1
 * A row with NaN, or with nothing but -infinity, becomes NaN and is reported.  */
PYKV_API pykv_status pykv_softmax(DLTensor* out, const DLTensor* logits, const DLTensor* temperature, void* stream);

/* out = logits where they are kept, as in pykv_sample; -infinity elsewhere.
 *   out, logits          [num_rows, vocab_size]  the same dtype, float32 | float16 | bfloat16; may be the same memory
 *   top_k, top_p, min_p, temperature             as in pykv_sample; temperature is at least 1e-5
 * A row with NaN, or with nothing but -infinity, stays as it is and is reported.  */
PYKV_API pykv_status pykv_top_k_top_p_mask(DLTensor* out, const DLTensor* logits, const DLTensor* top_k,
                                           const DLTensor* top_p, const DLTensor* min_p, const DLTensor* temperature,
                                           void* stream);

/* The same of probabilities: those that are kept, divided by their sum; 0 elsewhere.  Probabilities need not have the sum 1.
 *   out, probs  [num_rows, vocab_size]  the same dtype, float32 | float16 | bfloat16; may be the same memory
 * A row with NaN or +infinity, or with nothing above 0, becomes NaN and is reported.  */
PYKV_API pykv_status pykv_top_k_top_p_renorm(DLTensor* out, const DLTensor* probs, const DLTensor* top_k,
                                             const DLTensor* top_p, const DLTensor* min_p, void* stream);

/* logprobs = log_softmax(logits / temperature) of given tokens, and how many tokens come before each.
 *   logprobs     [num_rows, n]           float32; written
 *   logits       [num_rows, vocab_size]  float32 | float16 | bfloat16
 *   token_ids    [num_rows, n]           int32 or int64.  Ids out of range are reported: NaN, and rank -1
 *   temperature  as in pykv_softmax
 *   ranks        [num_rows, n]           int32; written, 0 for the first token of the row's order; NULL: not wanted
 * A row with NaN, or with nothing but -infinity, gives NaN and is reported.  */
PYKV_API pykv_status pykv_token_logprobs(DLTensor* logprobs, const DLTensor* logits, const DLTensor* token_ids,
                                         const DLTensor* temperature, DLTensor* ranks, void* stream);

/* Speculative decoding: the tokens of a draft that the target model accepts, in order, and one more.  Token x at position i is
 * accepted if u * draft_probs[i][x] < target_probs[i][x].  The first that is not is replaced by a token drawn by
 * max(target_probs[i] - draft_probs[i], 0), or by target_probs[i] where that is 0 everywhere; after a draft that is accepted
 * whole, one is drawn by the target's next row.  So tokens have the distribution of the target model alone.
 * u is (w + 1/2) / 2^32 with w the first word of Philox4x32-10 for the key seed and the counter (i, 1, step); the noise of what
 * is drawn at position i is that of pykv_sample for step + i.
 *   out              [num_requests, num_draft + 1]              int32 or int64; written, -1 behind the last token.  -1 in its
 *                    place, reported: the row holds NaN or infinity, or nothing above 0
 *   draft_token_ids  [num_requests, num_draft]                  int32 or int64.  Ids out of range are reported, and rejected
 *   target_probs     [num_requests, num_draft + 1, vocab_size]  float32; a row of one 1 is greedy
 *   draft_probs      [num_requests, num_draft, vocab_size]      float32; NULL: draft tokens have the probability 1
 *   draft_lens       [num_requests]                             int32 or int64: shorter drafts; NULL: num_draft.  Others than
 *                    0 ... num_draft are clamped and reported
 *   seeds, steps     [num_requests]                             int32 or int64; NULL: 0
 *   num_accepted     [num_requests]                             int32; written; NULL: not wanted  */
PYKV_API pykv_status pykv_rejection_sample(DLTensor* out, const DLTensor* draft_token_ids, const DLTensor* target_probs,
                                           const DLTensor* draft_probs, const DLTensor* draft_lens,
                                           const DLTensor* seeds, const DLTensor* steps, DLTensor* num_accepted,
                                           void* stream);

/* The same for a tree of drafts: the tokens on a path from the root that the target model accepts, in order, and one more.
 * Node 0 is the root, the last token that is known; from each node links lead to its first child, from a child to the next one.
 * With target_token_ids, a child is accepted if its token is the target's after its parent, and the one more is the target's
 * token after the last accepted node.  With target_probs, the first child is accepted for which u, that of
 * pykv_rejection_sample for the number of tokens accepted so far, lies below the sum of the probabilities of its token and of
 * those of the children before it (a token that is there twice counts once).  If there is none, a token that none of them has
 * is drawn by the target's probabilities, with the noise that pykv_rejection_sample has, too.  So tokens have the distribution
 * of the target model alone, and a tree without branches gives what pykv_rejection_sample does without draft_probs.
 *   out               [num_requests, num_out]    int32 or int64; written, -1 behind the last token.  1 <= num_out <= num_nodes:
 *                     a path ends with the last column.  -1 in place of the last token, reported: the row of target_probs
 *                     holds NaN or infinity, or nothing above 0
 *   draft_token_ids   [num_requests, num_nodes]  int32 or int64; up to 2048 nodes.  With target_probs, ids out of range are
 *                     reported where the path comes by, and rejected
 *   next_token        [num_requests, num_nodes]  int32 or int64: a node's first child; negative: none
 *   next_sibling      [num_requests, num_nodes]  int32 or int64: the next child of the same parent; negative: none.  Links out
 *                     of range are none, and reported.  A path ends where links lead to a node a second time, which is
 *                     reported
 *   target_probs      [num_requests, num_nodes, vocab_size]  float32: after each node; or
 *   target_token_ids  [num_requests, num_nodes]  int32 or int64: greedy.  The other one is NULL
 *   retrieve_index    [num_requests, num_nodes]  int32 or int64: what accepted_index calls the nodes; NULL: their numbers
 *   seeds, steps      [num_requests]             int32 or int64; NULL: 0
 *   accepted_index    [num_requests, num_out]    int32 or int64; written with the nodes on the path, the root first, -1 behind
 *                     them; NULL: not wanted
 *   num_accepted      [num_requests]             int32; written, without the root; NULL: not wanted  */
PYKV_API pykv_status pykv_verify_tree(DLTensor* out, const DLTensor* draft_token_ids, const DLTensor* next_token,
                                      const DLTensor* next_sibling, const DLTensor* target_probs,
                                      const DLTensor* target_token_ids, const DLTensor* retrieve_index,
                                      const DLTensor* seeds, const DLTensor* steps, DLTensor* accepted_index,
                                      DLTensor* num_accepted, void* stream);

#endif /* PYKV_SAMPLING_H_ */
