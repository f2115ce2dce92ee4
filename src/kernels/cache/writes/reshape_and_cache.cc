#include "cache/writes/reshape_and_cache.h"

#include <cinttypes>
#include <cstring>

#include "cache/writes/reshape_and_cache_inputs.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

struct Sizes {
  Dim rows{"num_rows"}, heads{"num_kv_heads"}, head_size{"head_size"}, v_head_size{"v_head_size"};
  Dim blocks{"num_blocks"}, block_size{"block_size"};
};

// The strides of a cache in one of its layouts; `axis_*` say which dimension is which.
struct Layout {
  int axis_token, axis_head, axis_chunk;
  int64_t chunk;
};

void fill(CacheSide& s, const Tensor& data, const Tensor& cache) {
  s.data = data.data();
  s.data_token = data.stride(0);
  s.data_head = data.stride(1);
  s.data_dim = data.stride(2);
  s.head_size = data.size(2);
  s.cache = cache.data();
}

void set_layout(CacheSide& s, const Tensor& cache, const Layout& layout) {
  s.block = cache.stride(0);
  s.token = cache.stride(layout.axis_token);
  s.head = cache.stride(layout.axis_head);
  s.chunk_stride = cache.stride(layout.axis_chunk);
  s.chunk = layout.chunk;
}

// [NB, H, D / x, BS, x]: x elements are 16 bytes, here as in the kernels that read the cache.
Layout packed_key(Tensor& cache, Sizes& d) {
  Dim chunks{"head_size / x"}, x{"x"};
  cache.shape(d.blocks, d.heads, chunks, d.block_size, x);
  const int64_t wanted = 16 / static_cast<int64_t>(size_of(cache.type()));
  if (x != wanted || chunks * wanted != d.head_size)
    cache.fail(PYKV_VALUE_ERROR,
               "must have shape [num_blocks, %" PRId64 ", %" PRId64 " / x, block_size, x] with x = 16 bytes = %" PRId64
               " elements, got %s",
               static_cast<int64_t>(d.heads), static_cast<int64_t>(d.head_size), wanted, cache.shape_string().c_str());
  cache.contiguous_rows();
  return {3, 1, 2, x};
}

Layout packed_value(Tensor& cache, Sizes& d) {
  cache.shape(d.blocks, d.heads, d.v_head_size, d.block_size);
  return cache.stride(2) == 1 ? Layout{3, 1, 2, d.v_head_size} : Layout{3, 1, 2, 1};
}

// [NB, H, BS / x, D, x] with x of the key cache.
Layout interleaved_value(Tensor& cache, Sizes& d, CacheSide& s) {
  Dim groups{"block_size / x"}, x{"x"};
  cache.shape(d.blocks, d.heads, groups, d.v_head_size, x);
  const int64_t wanted = 16 / static_cast<int64_t>(size_of(cache.type()));
  if (x != wanted || groups * wanted != d.block_size)
    cache.fail(PYKV_VALUE_ERROR,
               "must have shape [num_blocks, num_kv_heads, %" PRId64
               " / x, v_head_size, x] with x = 16 bytes = %" PRId64 " elements for interleaved_v, got %s",
               static_cast<int64_t>(d.block_size), wanted, cache.shape_string().c_str());
  cache.contiguous_rows();
  s.group = cache.stride(2);
  s.group_tokens = x;
  return {4, 1, 3, 1};
}

Layout flash(Tensor& cache, Sizes& d, Dim& head_size) {
  cache.shape(d.blocks, d.block_size, d.heads, head_size);
  return cache.stride(3) == 1 ? Layout{1, 2, 3, head_size} : Layout{1, 2, 3, 1};
}

// Bytes from page to page, and what is in a page.
void set_pages(CacheSide& s, Tensor& cache, Sizes& d, const Dim& head_size, bool swizzled) {
  Dim bytes{"head_size * 9 / 16", nvfp4_bytes(head_size)};
  s.page = nvfp4_page(cache.shape(d.blocks, d.block_size, d.heads, bytes), head_size, swizzled);
  s.block = cache.stride(0);
  s.token = s.page.codes_token;
  s.head = s.page.codes_head;
  s.chunk = head_size;
}

pykv_status run(const char* op, const char* report, bool packed, const ReshapeAndCacheInputs& inputs, void* stream) {
  return guarded(op, [&](Call& call) {
    ReshapeAndCacheArgs args;
    args.report = report;
    take_inputs(args, call, packed, inputs);
    if (args.num_tokens == 0 || args.num_heads == 0) return;
    call.run(stream, args, reshape_and_cache_cpu, PYKV_CUDA(reshape_and_cache_cuda));
  });
}

}  // namespace

void take_inputs(ReshapeAndCacheArgs& args, Call& call, bool packed, const ReshapeAndCacheInputs& a) {
  Sizes d;
  Tensor key = call.read(a.names.key, a.key).shape(d.rows, d.heads, d.head_size).dtype(kFloats);
  Dim value_rows{"num_rows of value"};
  Tensor value = call.read(a.names.value, a.value).shape(value_rows, d.heads, d.v_head_size).like(key);
  Tensor key_cache = call.write(a.names.key_cache, a.key_cache).no_overlap_within();
  Tensor value_cache = call.write(a.names.value_cache, a.value_cache).no_overlap_within();

  for (const Tensor* cache : {&key_cache, &value_cache})
    args.format = kv_format(a.kv_cache_dtype, *cache, key.type(), {KvFormat::kInt8, KvFormat::kNvfp4});
  if (packed && args.format == KvFormat::kNvfp4)
    fail(PYKV_VALUE_ERROR,
         "kv_cache_dtype: 'nvfp4' is for flash caches (NHD, HND) and MLA caches; packed ones cannot hold it");
  fill(args.key, key, key_cache);
  fill(args.value, value, value_cache);
  if (args.format == KvFormat::kNvfp4) {
    set_pages(args.key, key_cache, d, d.head_size, false);
    set_pages(args.value, value_cache, d, d.v_head_size, true);
  } else {
    set_layout(args.key, key_cache, packed ? packed_key(key_cache, d) : flash(key_cache, d, d.head_size));
    set_layout(args.value, value_cache,
               !packed           ? flash(value_cache, d, d.v_head_size)
               : a.interleaved_v ? interleaved_value(value_cache, d, args.value)
                                 : packed_value(value_cache, d));
  }
  if (args.format != KvFormat::kSame) {
    call.scale(args.key.scale, "k_scale", a.k_scale, d.heads);
    call.scale(args.value.scale, "v_scale", a.v_scale, d.heads);
  }

  args.key.four_over_six = args.value.four_over_six = std::strcmp(a.kv_cache_dtype, "nvfp4_4over6") == 0;

  Dim tokens{"num_tokens"};
  Tensor slots = call.read("slot_mapping", a.slot_mapping).shape(tokens);
  args.slots = slots.index();
  for (const Tensor* t : {&key, &value})
    if (t->size(0) < tokens)
      t->fail(PYKV_VALUE_ERROR, "must have a row for each of the %" PRId64 " slots of slot_mapping, got shape %s",
              static_cast<int64_t>(tokens), t->shape_string().c_str());

  args.dtype = key.type();
  args.num_tokens = tokens;
  args.num_heads = d.heads;
  args.num_blocks = d.blocks;
  args.block_size = d.block_size;
}

}  // namespace pykv

pykv_status pykv_reshape_and_cache(const DLTensor* key, const DLTensor* value, DLTensor* key_cache,
                                   DLTensor* value_cache, const DLTensor* slot_mapping, const char* kv_cache_dtype,
                                   const DLTensor* k_scale, const DLTensor* v_scale, bool interleaved_v, void* stream) {
  pykv::ReshapeAndCacheInputs inputs{key,          value,          key_cache, value_cache,
                                     slot_mapping, kv_cache_dtype, k_scale,   v_scale};
  inputs.interleaved_v = interleaved_v;
  return pykv::run("reshape_and_cache", "reshape_and_cache: slot_mapping", true, inputs, stream);
}

pykv_status pykv_reshape_and_cache_flash(const DLTensor* key, const DLTensor* value, DLTensor* key_cache,
                                         DLTensor* value_cache, const DLTensor* slot_mapping,
                                         const char* kv_cache_dtype, const DLTensor* k_scale, const DLTensor* v_scale,
                                         void* stream) {
  return pykv::run("reshape_and_cache_flash", "reshape_and_cache_flash: slot_mapping", false,
                   {key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale}, stream);
}
