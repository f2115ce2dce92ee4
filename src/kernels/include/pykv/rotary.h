/* pykv: rotary position embedding. Queries and keys are rotated in place, in fp32, and rounded once; all else is said of
 * each function.
 *
 * Example, queries of two tokens on the host, without keys:
 *
 *   float q[2][4 * 8] = {{1}}, angles[16][8] = {{1, 1, 1, 1}};
 *   int64_t at[] = {0, 5}, of_tokens[] = {2}, of_query[] = {2, 32}, of_angles[] = {16, 8};
 *   DLTensor positions = {at, {kDLCPU, 0}, 1, {kDLInt, 64, 1}, of_tokens, NULL, 0};
 *   DLTensor query = {q, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_query, NULL, 0};
 *   DLTensor cos_sin_cache = {angles, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_angles, NULL, 0};
 *   if (pykv_rotary_embedding(&positions, &query, NULL, 8, &cos_sin_cache, true, 0, false, NULL) != PYKV_OK)
 *     puts(pykv_last_error());
 */
#ifndef PYKV_ROTARY_H_
#define PYKV_ROTARY_H_

#include "pykv/base.h"

/* Rotates pairs (x, y) of each head of query and key, in place, by the angles of the token's position:
 *   x' = x * cos_i - y * sin_i,  y' = y * cos_i + x * sin_i,   i = 0 ... rotary_dim / 2 - 1,
 * where (x, y) are the elements (o + i, o + rotary_dim / 2 + i) of the head in NeoX style, (o + 2 i, o + 2 i + 1)
 * otherwise (GPT-J), and o = rope_dim_offset.  Other elements are left alone.  inverse rotates back.  fp32, rounded once.
 *   positions      [num_tokens] or [batch, seq]    int32 | int64, any strides
 *   query          [<positions>, num_heads * head_size] or [<positions>, num_heads, head_size]
 *                                                  float32 | float16 | bfloat16; all strides but the last are free
 *   key            as query, with its own number of heads, strides and form; dtype of query; may be NULL
 *   cos_sin_cache  [max_position, rotary_dim]      float32 | float16 | bfloat16: cos_0 ... , sin_0 ... in each row
 * query and key may be parts of one buffer.  A position outside [0, max_position) is reported, and its token left as it
 * is. */
PYKV_API pykv_status pykv_rotary_embedding(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                                           const DLTensor* cos_sin_cache, bool is_neox, int64_t rope_dim_offset,
                                           bool inverse, void* stream);

/* The same with several tables of angles, one below the other: token t rotates by row positions[t] + offsets[t].
 *   positions              int32 | int64, as above
 *   rot_dim                rotary_dim
 *   cos_sin_cache_offsets  [num_tokens]  int32 | int64; with [batch, seq] positions batch * seq of them
 * A row outside the cache is reported, and its token left as it is. */
PYKV_API pykv_status pykv_batched_rotary_embedding(const DLTensor* positions, DLTensor* query, DLTensor* key,
                                                   int64_t head_size, const DLTensor* cos_sin_cache, bool is_neox,
                                                   int64_t rot_dim, const DLTensor* cos_sin_cache_offsets,
                                                   void* stream);

/* The same with several positions for each token (multimodal: time, height, width), which share the frequencies.
 *   positions          [num_axes, num_tokens] or [num_axes, batch, seq]; [num_tokens]: one for all axes (text)
 *   mrope_section      [num_axes]  int32 | int64, also on the host: how many of the frequencies each axis has; at most 4 axes.
 *                      On the host they must add up to rotary_dim / 2; on the device they are not looked at, and a frequency
 *                      behind the last one is of the last axis
 *   mrope_interleaved  false: axis 0 has the first mrope_section[0] frequencies, axis 1 the next, and so on.  true:
 *                      frequency i is of axis a = i % num_axes if i < num_axes * mrope_section[a], else of axis 0
 * A token with a position outside the cache is reported and left as it is. */
PYKV_API pykv_status pykv_mrope(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                                const DLTensor* cos_sin_cache, bool is_neox, const DLTensor* mrope_section,
                                bool mrope_interleaved, void* stream);

/* Rotations of dual chunk attention.  With c = chunk_size - local_size and m = position % c, key is rotated in place by
 * the angles of m, and query into five copies one behind the other, by the angles of: m; min(m + c, chunk_size);
 * min(2 c - 1, chunk_size); m + c; m + chunk_size.  Elements behind the rotary dimension are copied.
 *   query_out      [num_tokens, 5 * num_heads * head_size] or [num_tokens, 5 * num_heads, head_size]   dtype of query
 *   positions      [num_tokens]  int32 | int64
 *   query, key, cos_sin_cache    as in pykv_rotary_embedding; key may be NULL
 *   offsets        [num_tokens]  int32 | int64, added to positions; may be NULL
 * A token for which m + chunk_size is outside the cache, or m negative, is reported and left out. */
PYKV_API pykv_status pykv_dual_chunk_rotary_embedding(DLTensor* query_out, const DLTensor* positions,
                                                      const DLTensor* query, DLTensor* key, int64_t head_size,
                                                      const DLTensor* cos_sin_cache, bool is_neox, int64_t chunk_size,
                                                      int64_t local_size, const DLTensor* offsets, void* stream);

#endif /* PYKV_ROTARY_H_ */
