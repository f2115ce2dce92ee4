#include "cache/mla/concat_and_cache_mla.h"

#include <cinttypes>
#include <cstring>

#include "cache/mla/concat_and_cache_mla_inputs.h"
#include "cache/mla_record.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

MlaPart part_of(const Tensor& t) { return {t.data(), t.stride(0), t.stride(1), t.size(1)}; }

// The cache as records, one in each row of bytes.  Rope that is not given is zeros.
void check_records(Tensor& cache, const Tensor& kv_c, ConcatAndCacheMlaArgs& args) {
  cache.dtype({DType::kUInt8, DType::kInt8, DType::kFloat8E4M3}).contiguous_rows();
  if (args.latent.size % MlaRecord::kTile != 0)
    kv_c.fail(PYKV_VALUE_ERROR, "must have a multiple of 128 columns for kv_cache_dtype 'fp8_ds_mla', got shape %s",
              kv_c.shape_string().c_str());
  MlaRecord record{args.latent.size, args.rope.size};
  if (record.rope == 0 && cache.size(2) > record.bytes()) {
    record.rope = (cache.size(2) - record.bytes()) / 2;
    args.rope = {nullptr, 0, 1, record.rope};
  }
  if (cache.size(2) != record.bytes())
    cache.fail(PYKV_VALUE_ERROR, "must have records of %" PRId64 " bytes for kv_cache_dtype 'fp8_ds_mla', got shape %s",
               record.bytes(), cache.shape_string().c_str());
}

void check_nvfp4_records(Tensor& cache, const Tensor& kv_c, const ConcatAndCacheMlaArgs& args) {
  cache.dtype({DType::kUInt8, DType::kInt8}).contiguous_rows();
  const Nvfp4MlaRecord record{args.latent.size, args.rope.size};
  if (record.latent % Nvfp4MlaRecord::kLatentMultiple != 0 || record.rope % Nvfp4MlaRecord::kRopeMultiple != 0)
    kv_c.fail(PYKV_VALUE_ERROR,
              "must have a multiple of 64 columns, and k_pe of 8, for kv_cache_dtype 'nvfp4_ds_mla', got %" PRId64
              " and %" PRId64,
              record.latent, record.rope);
  if (cache.size(2) != record.bytes())
    cache.fail(PYKV_VALUE_ERROR,
               "must have records of %" PRId64 " bytes for kv_cache_dtype 'nvfp4_ds_mla', got shape %s", record.bytes(),
               cache.shape_string().c_str());
}

}  // namespace

void take_inputs(ConcatAndCacheMlaArgs& args, Call& call, const ConcatAndCacheMlaInputs& in) {
  const bool nvfp4_records = std::strcmp(required("kv_cache_dtype", in.kv_cache_dtype), "nvfp4_ds_mla") == 0;
  const bool records = nvfp4_records || std::strcmp(in.kv_cache_dtype, "fp8_ds_mla") == 0;
  Dim rows{"num_rows"}, pe_rows{"num_rows of k_pe"}, latent{"kv_lora_rank"}, rope{"rope_size"};
  Dim blocks{"num_blocks"}, block_size{"block_size"}, entry{"entry"}, tokens{"num_tokens"};
  Tensor c = call.read("kv_c", in.kv_c).shape(rows, latent);
  c.dtype(records ? std::initializer_list<DType>{DType::kFloat16, DType::kBFloat16} : kFloats);
  Tensor pe = call.read("k_pe", in.k_pe).shape(pe_rows, rope).like(c);
  Tensor cache = call.write("kv_cache", in.kv_cache).shape(blocks, block_size, entry).no_overlap_within();

  args.dtype = c.type();
  args.latent = part_of(c);
  args.rope = part_of(pe);
  if (nvfp4_records) {
    args.entry = MlaEntry::kNvfp4Record;
    args.format = KvFormat::kNvfp4;
    check_nvfp4_records(cache, c, args);
  } else if (records) {
    args.entry = MlaEntry::kRecord;
    args.format = KvFormat::kE4M3;
    check_records(cache, c, args);
  } else {
    args.format = kv_format(in.kv_cache_dtype, cache, c.type(), {KvFormat::kInt8, KvFormat::kNvfp4});
    Dim width{"kv_lora_rank + rope_size", latent + rope};
    Dim bytes{"(kv_lora_rank + rope_size) * 9 / 16", nvfp4_bytes(width)};
    cache.last_dim(args.format == KvFormat::kNvfp4 ? bytes : width);
    if (args.format == KvFormat::kNvfp4) args.page = nvfp4_page(cache, width, false);
    if (args.format != KvFormat::kSame && !in.skip_scale) call.scale(args.scale, in.scale_name, in.scale, 1);
  }
  args.four_over_six = std::strcmp(in.kv_cache_dtype, "nvfp4_4over6") == 0;
  args.cache = cache.data();
  args.block = cache.stride(0);
  args.token = cache.stride(1);
  args.dim = cache.stride(2);

  args.slots = call.read("slot_mapping", in.slot_mapping).shape(tokens).index();
  for (const Tensor* t : {&c, &pe})
    if (t->size(0) < tokens)
      t->fail(PYKV_VALUE_ERROR, "must have a row for each of the %" PRId64 " slots of slot_mapping, got shape %s",
              static_cast<int64_t>(tokens), t->shape_string().c_str());
  args.num_tokens = tokens;
  args.num_blocks = blocks;
  args.block_size = block_size;
}

}  // namespace pykv

pykv_status pykv_concat_and_cache_mla(const DLTensor* kv_c, const DLTensor* k_pe, DLTensor* kv_cache,
                                      const DLTensor* slot_mapping, const char* kv_cache_dtype, const DLTensor* scale,
                                      bool skip_scale, void* stream) {
  using namespace pykv;
  return guarded("concat_and_cache_mla", [&](Call& call) {
    ConcatAndCacheMlaArgs args;
    args.report = "concat_and_cache_mla: slot_mapping";
    take_inputs(args, call, {kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, "scale", scale, skip_scale});
    if (args.num_tokens == 0 || args.latent.size + args.rope.size == 0) return;
    call.run(stream, args, concat_and_cache_mla_cpu, PYKV_CUDA(concat_and_cache_mla_cuda));
  });
}
