// Rotation of query and key heads by angles that depend on a token's position.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

// The rotated part of all heads: element d of head h of token (b, s) is data[b * batch + s * token + h * head + d].
struct RotaryHeads {
  void* data;                  // [batch, seq, num_heads, rotary_dim]: rope_dim_offset is in it already
  int64_t batch, token, head;  // strides in elements
  int64_t num_heads;           // 0: absent
};

struct RotaryEmbeddingArgs {
  DType dtype, cache_dtype;  // of query and key; of cos_sin_cache

  RotaryHeads query, key;
  Index positions;  // of token (b, s) at b * position_batch + s * position_token
  int64_t position_batch, position_token;
  const void* cos_sin_cache;  // [max_position, rotary_dim]
  int64_t cache_stride;       // elements between two rows
  int64_t max_position;

  int64_t num_tokens, seq;  // token t = (t / seq, t % seq)
  int64_t rotary_dim;       // even
  bool is_neox, inverse;

  PYKV_HOST_DEVICE int64_t position(int64_t b, int64_t s) const {
    return positions[b * position_batch + s * position_token];
  }
};

PYKV_CPU_TWIN(rotary_embedding_cpu, RotaryEmbeddingArgs)
void rotary_embedding_cuda(const RotaryEmbeddingArgs& args, const Launch& launch);

}  // namespace pykv
