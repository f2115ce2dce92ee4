/* pykv: rotary position embedding. */
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

#endif /* PYKV_ROTARY_H_ */
