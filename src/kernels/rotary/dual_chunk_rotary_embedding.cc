#include "rotary/dual_chunk_rotary_embedding.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/rotary.h"

using namespace pykv;

pykv_status pykv_dual_chunk_rotary_embedding(DLTensor* query_out, const DLTensor* positions, const DLTensor* query,
                                             DLTensor* key, int64_t head_size, const DLTensor* cos_sin_cache,
                                             bool is_neox, int64_t chunk_size, int64_t local_size,
                                             const DLTensor* offsets, void* stream) {
  return guarded("dual_chunk_rotary_embedding", [&](Call& call) {
    if (head_size <= 0) fail(PYKV_VALUE_ERROR, "head_size: must be positive, got %" PRId64, head_size);
    if (local_size < 0 || local_size >= chunk_size)
      fail(PYKV_VALUE_ERROR, "local_size: must lie between 0 and chunk_size = %" PRId64 ", got %" PRId64, chunk_size,
           local_size);
    if (chunk_size > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "chunk_size: at most 2^31 - 1, got %" PRId64, chunk_size);
    Dim size("head_size", head_size), tokens("num_tokens");
    const Tensor pos = call.read("positions", positions).shape(tokens);
    const Tensor q = call.read("query", query).dtype(kFloats);
    DualChunkRotaryEmbeddingArgs args{};
    Rotation& r = args.rotation;
    r = rotation_of("dual_chunk_rotary_embedding: positions", pos, call.read("cos_sin_cache", cos_sin_cache), head_size,
                    0);
    r.dtype = q.type();
    r.is_neox = is_neox;
    const auto heads_of = [&](const Tensor& x) {
      RotaryHeads heads = rotary_heads(x, pos, size, 0);
      heads.batch = 0;
      return heads;
    };
    args.query = heads_of(q);
    const Tensor out = call.write("query_out", query_out).like(q).contiguous_rows().no_overlap_within();
    args.out = heads_of(out);
    if (args.out.num_heads != DualChunks::kCopies * args.query.num_heads)
      out.fail(PYKV_VALUE_ERROR, "must have %d times the heads of query, %" PRId64 ", got shape %s",
               DualChunks::kCopies, args.query.num_heads, out.shape_string().c_str());
    out.apart_from(q);
    args.out.num_heads = args.query.num_heads;
    args.copy = args.query.num_heads * args.out.head;
    if (key) r.key = heads_of(call.write("key", key).like(q).no_overlap_within());
    args.head_size = head_size;
    if (offsets) args.offsets = call.read("offsets", offsets).shape(tokens).index();
    args.chunks = {chunk_size - local_size, chunk_size};
    if (r.num_tokens == 0 || args.query.num_heads + r.key.num_heads == 0) return;
    call.run(stream, args, dual_chunk_rotary_embedding_cpu, PYKV_CUDA(dual_chunk_rotary_embedding_cuda));
  });
}
