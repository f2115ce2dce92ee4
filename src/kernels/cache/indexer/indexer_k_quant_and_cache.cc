#include "cache/indexer/indexer_k_quant_and_cache.h"

#include <cinttypes>
#include <cstring>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

IndexerScale scale_of(const char* kv_cache_dtype) {
  const auto named = [&](const char* name) { return std::strcmp(kv_cache_dtype, name) == 0; };
  if (named("ue8m0")) return IndexerScale::kPowerOfTwo;
  if (named("mxfp8")) return IndexerScale::kExponent;
  if (named("auto") || named("fp8") || named("fp8_e4m3")) return IndexerScale::kFloat;
  fail(PYKV_VALUE_ERROR,
       "kv_cache_dtype: must be 'ue8m0' (scales that are powers of two), 'mxfp8' (their exponents), 'auto', 'fp8' or "
       "'fp8_e4m3', got '%s'",
       kv_cache_dtype);
}

}  // namespace
}  // namespace pykv

pykv_status pykv_indexer_k_quant_and_cache(const DLTensor* k, DLTensor* kv_cache, const DLTensor* slot_mapping,
                                           int64_t quant_block_size, const char* kv_cache_dtype, void* stream) {
  using namespace pykv;
  return guarded("indexer_k_quant_and_cache", [&](Call& call) {
    Dim rows{"num_rows"}, head_dim{"head_dim"}, blocks{"num_blocks"}, block_size{"block_size"}, entry{"entry"};
    Dim tokens{"num_tokens"};
    Tensor keys = call.read("k", k).shape(rows, head_dim).dtype(kFloats);
    Tensor cache = call.write("kv_cache", kv_cache).shape(blocks, block_size, entry).no_overlap_within();
    if (quant_block_size <= 0 || head_dim % quant_block_size != 0)
      fail(PYKV_VALUE_ERROR, "quant_block_size: must be positive and divide head_dim = %" PRId64 ", got %" PRId64,
           static_cast<int64_t>(head_dim), quant_block_size);

    IndexerKQuantArgs args{};
    args.dtype = keys.type();
    args.k = keys.data();
    args.k_row = keys.stride(0);
    args.k_dim = keys.stride(1);
    args.group_size = quant_block_size;
    args.block = {block_size, head_dim, head_dim / quant_block_size};
    check_indexer_cache(cache, args.block);
    args.cache = cache.data();
    args.block_bytes = cache.stride(0);
    args.scale = scale_of(required("kv_cache_dtype", kv_cache_dtype));
    args.slots = call.read("slot_mapping", slot_mapping).shape(tokens).index();
    if (keys.size(0) < tokens)
      keys.fail(PYKV_VALUE_ERROR, "must have a row for each of the %" PRId64 " slots of slot_mapping, got shape %s",
                static_cast<int64_t>(tokens), keys.shape_string().c_str());
    args.num_tokens = tokens;
    args.num_blocks = blocks;
    if (tokens == 0 || head_dim == 0) return;
    call.run(stream, args, indexer_k_quant_and_cache_cpu, PYKV_CUDA(indexer_k_quant_and_cache_cuda));
  });
}
