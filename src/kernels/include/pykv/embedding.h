/* pykv: rows of an embedding table, whole or one shard of a vocabulary.
 *
 * Example, two rows of a table on the host:
 *
 *   float table[3][4] = {{1}, {2}, {3}}, y[2][4];
 *   int32_t tokens[2] = {2, 0};
 *   int64_t of_table[] = {3, 4}, of_y[] = {2, 4}, of_tokens[] = {2};
 *   DLTensor weight = {table, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_table, NULL, 0};
 *   DLTensor out = {y, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_y, NULL, 0};
 *   DLTensor ids = {tokens, {kDLCPU, 0}, 1, {kDLInt, 32, 1}, of_tokens, NULL, 0};
 *   if (pykv_masked_embedding(&out, &ids, &weight, 0, -1, 0, 0, 0, -1, 1.0, NULL, NULL, NULL, -1,
 *                             NULL) != PYKV_OK)
 *     puts(pykv_last_error());
 */
#ifndef PYKV_EMBEDDING_H_
#define PYKV_EMBEDDING_H_

#include "pykv/base.h"

/* out[t] = scale * weight_scale * weight[row of ids[t]] + position_weight[positions[t]], in fp32, rounded once.
 * The table is a shard of a vocabulary: rows of the ids org_start ... org_end - 1, then num_org_pad rows that belong to no id,
 * then rows of the ids added_start ... added_end - 1.  Ids of other shards count as rows of zeros, so that the sum over all
 * shards is the embedding.
 *   out              [..., hidden_size]   float32 | float16 | bfloat16; or any dtype, that of weight, where rows are copied as
 *                    they are: scale is 1, weight_scale and positions are NULL.  Written
 *   ids              [...]                int32 or int64; of several dimensions: compact.  Ids of no shard (below 0, or from
 *                    vocab_size on) count as rows of zeros and are reported
 *   weight           [num_rows, hidden_size]  float32 | float16 | bfloat16, or codes: int8, float8_e4m3fn (also as uint8) |
 *                    float8_e5m2.  Rows at any stride.  With quant_type uint8, [num_rows, bytes]: the blocks of a
 *                    row, whole ones; hidden_size is how many elements these have
 *   org_start, org_end       0 <= org_start <= org_end; org_end -1: org_start + num_rows
 *   num_org_pad              0 or more
 *   added_start, added_end   0 <= added_start <= added_end
 *   vocab_size       of all shards; -1: the larger one of org_end and added_end
 *   scale            of all
 *   weight_scale     [num_rows] or [num_rows, groups]  float32: of a row, or of its groups of hidden_size / groups neighbours;
 *                    NULL: 1
 *   positions        [...]                int32 or int64, like ids; NULL: none are added.  Positions out of range add nothing
 *                    and are reported
 *   position_weight  [num_positions, hidden_size]  float32 | float16 | bfloat16; NULL with positions
 *   quant_type       the block format of GGUF that weight has, as of pykv_ggml_dequantize; -1: none  */
PYKV_API pykv_status pykv_masked_embedding(DLTensor* out, const DLTensor* ids, const DLTensor* weight,
                                           int64_t org_start, int64_t org_end, int64_t num_org_pad, int64_t added_start,
                                           int64_t added_end, int64_t vocab_size, double scale,
                                           const DLTensor* weight_scale, const DLTensor* positions,
                                           const DLTensor* position_weight, int64_t quant_type, void* stream);

#endif /* PYKV_EMBEDDING_H_ */
