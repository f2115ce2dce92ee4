#include "rotary/rotary_embedding.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/rotary.h"

namespace pykv {
namespace {

// query or key, as [<positions>, num_heads * head_size] or [<positions>, num_heads, head_size].
RotaryHeads heads_of(Tensor x, const Tensor& positions, Dim& head_size, int64_t offset) {
  const int lead = positions.ndim();
  x.rank_between(lead + 1, lead + 2).contiguous_rows().no_overlap_within();
  for (int i = 0; i < lead; ++i)
    if (x.size(i) != positions.size(i))
      x.fail(PYKV_VALUE_ERROR, "dimension %d must be that of positions, %" PRId64 ", got shape %s", i,
             positions.size(i), x.shape_string().c_str());
  RotaryHeads heads{
      .data = static_cast<char*>(x.data()) + offset * size_of(x.type()),
      .batch = lead == 2 ? x.stride(0) : 0,
      .token = x.stride(lead - 1),
      .head = head_size,
      .num_heads = x.size(lead),
  };
  if (x.ndim() == lead + 2) {
    x.last_dim(head_size);
    heads.head = x.stride(lead);
    return heads;
  }
  if (x.size(-1) % head_size != 0)
    x.fail(PYKV_VALUE_ERROR, "the last dimension must be a multiple of head_size = %" PRId64 ", got shape %s",
           static_cast<int64_t>(head_size), x.shape_string().c_str());
  heads.num_heads = x.size(-1) / head_size;
  return heads;
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_rotary_embedding(const DLTensor* positions, DLTensor* query, DLTensor* key, int64_t head_size,
                                  const DLTensor* cos_sin_cache, bool is_neox, int64_t rope_dim_offset, bool inverse,
                                  void* stream) {
  return guarded("rotary_embedding", [&](Call& call) {
    if (head_size <= 0) fail(PYKV_VALUE_ERROR, "head_size: must be positive, got %" PRId64, head_size);
    Dim size("head_size", head_size);
    Tensor pos = call.read("positions", positions).rank_between(1, 2).dtype({DType::kInt64, DType::kInt32});
    const Tensor q = call.write("query", query).dtype(kFloats);
    const Tensor cache = call.read("cos_sin_cache", cos_sin_cache).rank(2).dtype(kFloats).contiguous_rows();
    const int64_t rotary_dim = cache.size(1);
    if (rotary_dim % 2 != 0)
      cache.fail(PYKV_VALUE_ERROR, "the last dimension holds cosines and sines and must be even, got shape %s",
                 cache.shape_string().c_str());
    if (rope_dim_offset < 0)
      fail(PYKV_VALUE_ERROR, "rope_dim_offset: must not be negative, got %" PRId64, rope_dim_offset);
    if (rotary_dim > head_size - rope_dim_offset)
      cache.fail(PYKV_VALUE_ERROR,
                 "rotary_dim %" PRId64 " + rope_dim_offset %" PRId64 " must not exceed head_size = %" PRId64,
                 rotary_dim, rope_dim_offset, head_size);

    const RotaryHeads queries = heads_of(q, pos, size, rope_dim_offset);
    RotaryHeads keys{};
    if (key) {
      const Tensor k = call.write("key", key).like(q);
      keys = heads_of(k, pos, size, rope_dim_offset);
      if (k.numel() > 0 && k.data() == q.data()) k.fail(PYKV_VALUE_ERROR, "must not share memory with query");
    }
    if (pos.numel() == 0 || rotary_dim == 0 || queries.num_heads + keys.num_heads == 0) return;

    const bool batched = pos.ndim() == 2;
    call.run(stream,
             RotaryEmbeddingArgs{
                 .dtype = q.type(),
                 .cache_dtype = cache.type(),
                 .query = queries,
                 .key = keys,
                 .positions = {pos.data(), 1, pos.type() == DType::kInt64},
                 .position_batch = batched ? pos.stride(0) : 0,
                 .position_token = pos.stride(-1),
                 .cos_sin_cache = cache.data(),
                 .cache_stride = cache.stride(0),
                 .max_position = cache.size(0),
                 .num_tokens = pos.numel(),
                 .seq = pos.size(-1),
                 .rotary_dim = rotary_dim,
                 .is_neox = is_neox,
                 .inverse = inverse,
             },
             rotary_embedding_cpu, PYKV_CUDA(rotary_embedding_cuda));
  });
}
