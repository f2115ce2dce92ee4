/* pykv: from logits to tokens.
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

#endif /* PYKV_SAMPLING_H_ */
