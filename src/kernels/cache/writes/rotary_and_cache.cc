#include "cache/writes/rotary_and_cache.h"

#include <cinttypes>
#include <cstring>

#include "cache/writes/reshape_and_cache_inputs.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

// From the shape of a cache, flash or packed; other shapes are refused later.
int64_t head_size_of(const Tensor& cache, bool packed, bool nvfp4, bool of_key) {
  if (!packed) return cache.ndim() != 4 ? 0 : nvfp4 ? cache.size(3) * 16 / 9 : cache.size(3);
  if (of_key) return cache.size(2) * cache.size(4);
  return cache.ndim() == 4 ? cache.size(2) : 0;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_rotary_and_cache(const DLTensor* positions, DLTensor* query, DLTensor* key, const DLTensor* value,
                                  const DLTensor* cos_sin_cache, bool is_neox, DLTensor* key_cache,
                                  DLTensor* value_cache, const DLTensor* slot_mapping, const char* kv_cache_dtype,
                                  const DLTensor* k_scale, const DLTensor* v_scale, int64_t rope_dim_offset,
                                  void* stream) {
  using namespace pykv;
  return guarded("rotary_and_cache", [&](Call& call) {
    const Tensor pos = call.read("positions", positions).rank(1);
    const Tensor q = call.write("query", query).dtype(kFloats);
    const Tensor k = call.write("key", key).like(q).rank_between(2, 3);
    const Tensor v = call.read("value", value).like(q).rank_between(2, 3);
    const Tensor k_cache = call.write("key_cache", key_cache).rank_between(4, 5);
    const Tensor v_cache = call.write("value_cache", value_cache).rank(4);
    const bool packed = k_cache.ndim() == 5;
    const bool nvfp4 = std::strcmp(required("kv_cache_dtype", kv_cache_dtype), "nvfp4") == 0;
    Dim head_size{"head_size", head_size_of(k_cache, packed, nvfp4, true)};
    const HeadsView keys(k, *key, head_size), values(v, *value, head_size_of(v_cache, packed, nvfp4, false));

    RotaryAndCacheArgs args;
    args.cache.report = "rotary_and_cache: slot_mapping";
    take_inputs(args.cache, call, packed,
                {&keys.tensor, &values.tensor, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale});

    Rotation& rotation = args.rotation;
    rotation = rotation_of("rotary_and_cache: positions", pos, call.read("cos_sin_cache", cos_sin_cache), head_size,
                           rope_dim_offset);
    rotation.dtype = q.type();
    rotation.is_neox = is_neox;
    rotation.query = rotary_heads(q, pos, head_size, rope_dim_offset);
    rotation.key = rotary_heads(k, pos, head_size, rope_dim_offset);
    args.rope_dim_offset = rope_dim_offset;
    k.apart_from(q);
    v.apart_from(q);
    v.apart_from(k);
    if (rotation.num_tokens == 0 || rotation.query.num_heads + rotation.key.num_heads == 0) return;
    call.run(stream, args, rotary_and_cache_cpu, PYKV_CUDA(rotary_and_cache_cuda));
  });
}
