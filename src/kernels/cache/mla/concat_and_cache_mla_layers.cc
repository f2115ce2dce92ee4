#include "cache/mla/concat_and_cache_mla_layers.h"

#include <cinttypes>
#include <cstring>
#include <vector>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

struct Inputs {
  const DLTensor *kv_c, *k_pe, *slot_mapping, *kv_scales;
  const char* kv_cache_dtype;
};

struct Sizes {
  Dim layers{"num_layers"}, latent{"kv_lora_rank"}, rope{"rope_size"};
  int64_t width() const { return latent + rope; }
};

MlaPart part_of(const Tensor& t) { return {t.data(), t.stride(1), t.stride(2), t.size(2)}; }

// All but where the caches are, in the format that `cache` shows; the layers are those of kv_c.
Sizes take_inputs(ConcatAndCacheMlaLayersArgs& args, Call& call, const Inputs& in, const DLTensor* cache) {
  Sizes d;
  Dim rows{"num_rows"}, pe_rows{"num_rows of k_pe"}, tokens{"num_tokens"};
  Tensor c = call.read("kv_c", in.kv_c).shape(d.layers, rows, d.latent).dtype(kFloats);
  Tensor pe = call.read("k_pe", in.k_pe).shape(d.layers, pe_rows, d.rope).like(c);
  Tensor slots = call.read("slot_mapping", in.slot_mapping).shape(d.layers, tokens);
  for (const Tensor* t : {&c, &pe})
    if (t->size(1) < tokens)
      t->fail(PYKV_VALUE_ERROR, "must have a row for each of the %" PRId64 " slots of slot_mapping, got shape %s",
              static_cast<int64_t>(tokens), t->shape_string().c_str());

  ConcatAndCacheMlaArgs& first = args.first;
  first.dtype = c.type();
  first.latent = part_of(c);
  first.rope = part_of(pe);
  first.slots = slots.index();
  first.num_tokens = tokens;
  args.num_layers = d.layers;
  args.latent_layer = c.stride(0);
  args.rope_layer = pe.stride(0);
  args.slots_layer = slots.stride(0);

  // caches that are known by their addresses alone have the elements that they ought to have
  DLTensor known = *in.kv_c;
  if (std::strncmp(required("kv_cache_dtype", in.kv_cache_dtype), "fp8", 3) == 0) known.dtype = {kDLUInt, 8, 1};
  first.format = kv_format(in.kv_cache_dtype, Tensor("kv_caches", cache ? cache : &known), c.type());
  if (first.format != KvFormat::kSame && in.kv_scales) {
    const Tensor scales("kv_scales", in.kv_scales);
    if (scales.numel() != 1 && scales.numel() != d.layers)
      scales.fail(PYKV_VALUE_ERROR, "must have 1 element, or one for each of the %" PRId64 " layers, got shape %s",
                  static_cast<int64_t>(d.layers), scales.shape_string().c_str());
    call.scale(first.scale, "kv_scales", in.kv_scales, d.layers);
  }
  return d;
}

void run(Call& call, void* stream, const ConcatAndCacheMlaLayersArgs& args, const Sizes& d) {
  if (args.first.num_tokens == 0 || args.num_layers == 0 || d.width() == 0) return;
  call.run(stream, args, concat_and_cache_mla_layers_cpu, PYKV_CUDA(concat_and_cache_mla_layers_cuda));
}

}  // namespace
}  // namespace pykv

pykv_status pykv_concat_and_cache_mla_layers(const DLTensor* kv_c, const DLTensor* k_pe, pykv_tensor_list kv_caches,
                                             const DLTensor* slot_mapping, const char* kv_cache_dtype,
                                             const DLTensor* kv_scales, void* stream) {
  using namespace pykv;
  return guarded("concat_and_cache_mla_layers", [&](Call& call) {
    ConcatAndCacheMlaLayersArgs args;
    args.first.report = "concat_and_cache_mla_layers: slot_mapping";
    const Inputs in{kv_c, k_pe, slot_mapping, kv_scales, kv_cache_dtype};
    check_list("kv_caches", kv_caches);
    const Sizes d = take_inputs(args, call, in, kv_caches.size > 0 ? kv_caches.tensors[0] : nullptr);
    if (kv_caches.size != d.layers)
      fail(PYKV_VALUE_ERROR, "kv_caches: must be one cache for each of the %" PRId64 " layers, got %" PRId64,
           static_cast<int64_t>(d.layers), kv_caches.size);

    Dim blocks{"num_blocks"}, block_size{"block_size"}, width{"kv_lora_rank + rope_size", d.width()};
    std::vector<void*> caches;
    for (int64_t i = 0; i < kv_caches.size; ++i) {
      Tensor cache = call.write("kv_caches", kv_caches.tensors[i]).shape(blocks, block_size, width);
      cache.no_overlap_within();
      const Tensor first("kv_caches", kv_caches.tensors[0]);
      for (int axis = 0; axis < 3; ++axis)
        if (cache.type() != first.type() || cache.stride(axis) != first.stride(axis))
          cache.fail(PYKV_VALUE_ERROR,
                     "must all have one dtype and the same strides, got another at %" PRId64 " than at 0", i);
      caches.push_back(cache.data());
      args.first.block = cache.stride(0);
      args.first.token = cache.stride(1);
      args.first.dim = cache.stride(2);
    }
    args.caches = caches.data();
    args.first.num_blocks = blocks;
    args.first.block_size = block_size;
    run(call, stream, args, d);
  });
}

pykv_status pykv_concat_and_cache_mla_grouped(const DLTensor* kv_c, const DLTensor* k_pe, const DLTensor* kv_cache_ptrs,
                                              const DLTensor* slot_mapping, int64_t block_size, int64_t block_stride,
                                              int64_t entry_stride, const DLTensor* kv_scales,
                                              const char* kv_cache_dtype, int64_t num_blocks, void* stream) {
  using namespace pykv;
  return guarded("concat_and_cache_mla_grouped", [&](Call& call) {
    ConcatAndCacheMlaLayersArgs args;
    args.first.report = "concat_and_cache_mla_grouped: slot_mapping";
    Sizes d = take_inputs(args, call, {kv_c, k_pe, slot_mapping, kv_scales, kv_cache_dtype}, nullptr);
    const Tensor ptrs = call.read("kv_cache_ptrs", kv_cache_ptrs).shape(d.layers).dtype({DType::kInt64});
    args.addresses = static_cast<const int64_t*>(ptrs.data());
    args.address_step = ptrs.stride(0);

    const auto at_least = [](const char* name, int64_t value, int64_t least, const char* what) {
      if (value < least)
        fail(PYKV_VALUE_ERROR, "%s: must be at least %s = %" PRId64 ", got %" PRId64, name, what, least, value);
    };
    at_least("block_size", block_size, 1, "one token");
    at_least("block_stride", block_stride, d.width(), "kv_lora_rank + rope_size");
    at_least("entry_stride", entry_stride, d.width(), "kv_lora_rank + rope_size");
    args.first.block_size = block_size;
    args.first.block = block_stride;
    args.first.token = entry_stride;
    args.first.dim = 1;
    const int64_t most = INT64_MAX / block_size;
    args.first.num_blocks = num_blocks < 0 || num_blocks > most ? most : num_blocks;
    run(call, stream, args, d);
  });
}
