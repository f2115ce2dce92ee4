#include "cache/mla/concat_and_cache_mla_rope.h"

#include "cache/mla/concat_and_cache_mla_inputs.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

// One head of a token: `part` of the entry, from element `first` on.
void fill(CacheSide& side, const MlaPart& part, const ConcatAndCacheMlaArgs& entry, int64_t first, int64_t item) {
  side.data = part.data;
  side.data_token = part.row;
  side.data_head = 0;
  side.data_dim = part.dim;
  side.head_size = part.size;
  side.cache = static_cast<char*>(entry.cache) + first * entry.dim * item;
  side.block = entry.block;
  side.token = entry.token;
  side.head = 0;
  side.chunk = entry.dim == 1 ? part.size : 1;
  side.chunk_stride = entry.dim;
  side.scale.take(entry.scale);
}

}  // namespace
}  // namespace pykv

pykv_status pykv_concat_and_cache_mla_rope_fused(const DLTensor* positions, DLTensor* q_pe, DLTensor* k_pe,
                                                 const DLTensor* kv_c, const DLTensor* cos_sin_cache, bool is_neox,
                                                 const DLTensor* slot_mapping, DLTensor* kv_cache,
                                                 const char* kv_cache_dtype, const DLTensor* kv_cache_scale,
                                                 bool rotate_in_fp32, bool rotate_padded, void* stream) {
  using namespace pykv;
  return guarded("concat_and_cache_mla_rope_fused", [&](Call& call) {
    Dim rope{"rope_size"}, tokens{"num_rows"}, rows{"num_rows of kv_c"}, latent{"kv_lora_rank"};
    const Tensor pos = call.read("positions", positions).shape(tokens);
    const Tensor pe = call.write("k_pe", k_pe).shape(tokens, rope).dtype(kFloats).no_overlap_within();
    const Tensor q = call.write("q_pe", q_pe).like(pe);
    const Tensor c = call.read("kv_c", kv_c).shape(rows, latent).like(pe);
    const Tensor angles = call.read("cos_sin_cache", cos_sin_cache).last_dim(rope);

    ConcatAndCacheMlaRopeArgs args;
    Rotation& rotation = args.rotary.rotation;
    rotation = rotation_of("concat_and_cache_mla_rope_fused: positions", pos, angles, rope, 0);
    rotation.dtype = pe.type();
    rotation.is_neox = is_neox;
    if (rope > 0) {
      rotation.query = rotary_heads(q, pos, rope, 0);
      rotation.key = rotary_heads(pe, pos, rope, 0);
    }
    q.apart_from(pe);
    c.apart_from(pe);
    c.apart_from(q);

    args.concat.report = "concat_and_cache_mla_rope_fused: slot_mapping";
    take_inputs(args.concat, call,
                {kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, "kv_cache_scale", kv_cache_scale, false});
    const ConcatAndCacheMlaArgs& entry = args.concat;
    args.rotary.in_dtype = !rotate_in_fp32;
    args.rotary.only_cached = !rotate_padded;
    args.rotary.rotate_only = entry.entry != MlaEntry::kPlain || entry.format == KvFormat::kNvfp4;

    ReshapeAndCacheArgs& cache = args.rotary.cache;
    cache.report = entry.report;
    cache.dtype = entry.dtype;
    cache.format = args.rotary.rotate_only ? KvFormat::kSame : entry.format;
    cache.slots = entry.slots;
    cache.num_tokens = entry.num_tokens;
    cache.num_heads = 1;
    cache.num_blocks = entry.num_blocks;
    cache.block_size = entry.block_size;
    const int64_t item = cache.format == KvFormat::kSame ? static_cast<int64_t>(size_of(entry.dtype)) : 1;
    fill(cache.value, entry.latent, entry, 0, item);
    fill(cache.key, entry.rope.data ? entry.rope : MlaPart{}, entry, latent, item);
    if (rotation.num_tokens == 0 || entry.latent.size + entry.rope.size == 0) return;
    call.run(stream, args, concat_and_cache_mla_rope_cpu, PYKV_CUDA(concat_and_cache_mla_rope_cuda));
  });
}
