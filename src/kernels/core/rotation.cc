#include "core/rotation.h"

#include <cinttypes>

#include "core/check.h"

namespace pykv {

RotaryHeads rotary_heads(Tensor x, const Tensor& positions, Dim& head_size, int64_t rope_dim_offset) {
  const int lead = positions.ndim();
  x.rank_between(lead + 1, lead + 2).contiguous_rows().no_overlap_within();
  for (int i = 0; i < lead; ++i)
    if (x.size(i) != positions.size(i))
      x.fail(PYKV_VALUE_ERROR, "dimension %d must be that of positions, %" PRId64 ", got shape %s", i,
             positions.size(i), x.shape_string().c_str());
  RotaryHeads heads{
      .data = static_cast<char*>(x.data()) + rope_dim_offset * size_of(x.type()),
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
  if (head_size == 0 || x.size(-1) % head_size != 0)
    x.fail(PYKV_VALUE_ERROR, "the last dimension must be a multiple of %s = %" PRId64 ", got shape %s",
           head_size.name(), static_cast<int64_t>(head_size), x.shape_string().c_str());
  heads.num_heads = x.size(-1) / head_size;
  return heads;
}

Rotation rotation_of(const char* report, Tensor positions, Tensor cos_sin_cache, int64_t head_size,
                     int64_t rope_dim_offset) {
  const Index index = positions.index();
  cos_sin_cache.rank(2).dtype(kFloats).contiguous_rows();
  const int64_t rotary_dim = cos_sin_cache.size(1);
  if (rotary_dim % 2 != 0)
    cos_sin_cache.fail(PYKV_VALUE_ERROR, "the last dimension holds cosines and sines and must be even, got shape %s",
                       cos_sin_cache.shape_string().c_str());
  if (rope_dim_offset < 0)
    fail(PYKV_VALUE_ERROR, "rope_dim_offset: must not be negative, got %" PRId64, rope_dim_offset);
  if (rotary_dim > head_size - rope_dim_offset)
    cos_sin_cache.fail(PYKV_VALUE_ERROR,
                       "rotary_dim %" PRId64 " + rope_dim_offset %" PRId64 " must not exceed head_size = %" PRId64,
                       rotary_dim, rope_dim_offset, head_size);
  const bool batched = positions.ndim() == 2;
  Rotation r{};
  r.report = report;
  r.cache_dtype = cos_sin_cache.type();
  r.positions = {index.data, 1, index.is_int64};
  r.position_batch = batched ? positions.stride(0) : 0;
  r.position_token = positions.stride(-1);
  r.cos_sin_cache = cos_sin_cache.data();
  r.cache_stride = cos_sin_cache.stride(0);
  r.sines = rotary_dim / 2;
  r.max_position = cos_sin_cache.size(0);
  r.num_tokens = positions.numel();
  r.seq = positions.size(-1);
  r.rotary_dim = rotary_dim;
  return r;
}

}  // namespace pykv
