#include "rotary/rotary_embedding.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/rotary.h"

pykv_status pykv_rotary_embedding(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                                  const DLTensor* cos_sin_cache, bool is_neox, int64_t rope_dim_offset, bool inverse,
                                  void* stream) {
  using namespace pykv;
  return guarded("rotary_embedding", [&](Call& call) {
    if (head_size <= 0) fail(PYKV_VALUE_ERROR, "head_size: must be positive, got %" PRId64, head_size);
    Dim size("head_size", head_size);
    const Tensor pos = call.read("positions", positions).rank_between(1, 2);
    const Tensor q = call.write("query", query).dtype(kFloats);
    Rotation args = rotation_of("rotary_embedding: positions", pos, call.read("cos_sin_cache", cos_sin_cache),
                                head_size, rope_dim_offset);
    args.dtype = q.type();
    args.is_neox = is_neox;
    args.inverse = inverse;
    args.query = rotary_heads(q, pos, size, rope_dim_offset);
    if (key) {
      const Tensor k = call.write("key", key).like(q);
      args.key = rotary_heads(k, pos, size, rope_dim_offset);
      no_shared_memory(k, q);
    }
    if (args.num_tokens == 0 || args.rotary_dim == 0 || args.query.num_heads + args.key.num_heads == 0) return;
    call.run(stream, args, rotary_embedding_cpu, PYKV_CUDA(rotary_embedding_cuda));
  });
}
