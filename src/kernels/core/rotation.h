// What ops that rotate heads by the angles of their tokens' positions (rotary embedding) have in common.
#pragma once

#include "core/args.h"

namespace pykv {

class Dim;
class Tensor;

// The rotated part of all heads: element d of head h of token (b, s) is data[b * batch + s * token + h * head + d].
struct RotaryHeads {
  void* data;                  // [batch, seq, num_heads, rotary_dim]: rope_dim_offset is in it already
  int64_t batch, token, head;  // strides in elements
  int64_t num_heads;           // 0: absent
};

struct Rotation {
  const char* report;        // "op: positions"
  DType dtype, cache_dtype;  // of query and key; of cos_sin_cache

  RotaryHeads query, key;
  Index positions;  // of token (b, s) at b * position_batch + s * position_token
  int64_t position_batch, position_token;
  const void* cos_sin_cache;  // [max_position, rotary_dim]: cosines, then sines
  int64_t cache_stride;       // elements between two rows
  int64_t sines;              // elements from a row's cosines to its sines
  int64_t max_position;

  int64_t num_tokens, seq;  // token t = (t / seq, t % seq)
  int64_t rotary_dim;       // even
  bool is_neox, inverse;

  PYKV_HOST_DEVICE int64_t position(int64_t b, int64_t s) const {
    return positions[b * position_batch + s * position_token];
  }
};

// query or key, as [<positions>, num_heads * head_size] or [<positions>, num_heads, head_size].
RotaryHeads rotary_heads(Tensor x, const Tensor& positions, Dim& head_size, int64_t rope_dim_offset);

// Positions and angles, checked against heads of that size; everything else of the rotation is left 0.
Rotation rotation_of(const char* report, Tensor positions, Tensor cos_sin_cache, int64_t head_size,
                     int64_t rope_dim_offset);

}  // namespace pykv
