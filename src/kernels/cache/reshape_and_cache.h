// New keys and values into their slots of a paged cache.  The layouts differ in strides alone, so that one kernel idea
// serves pykv_reshape_and_cache and pykv_reshape_and_cache_flash.
#pragma once

#include "core/args.h"
#include "core/nvfp4.h"
#include "cpu/isa.h"

namespace pykv {

// Keys or values: where they come from and where they go.  Element (b, o, h, d) of the cache lies at
//   b * block + o * token + h * head + (d / chunk) * chunk_stride + d % chunk
// with chunk = head_size for the flash layouts, x for packed keys and 1 for packed values.  Of an nvfp4 cache only `cache`
// and `block` count, which is in bytes; the rest is said by `page`.
struct CacheSide {
  const void* data;                         // [num_rows, num_heads, head_size]
  int64_t data_token, data_head, data_dim;  // elements
  void* cache;
  int64_t block, token, head, chunk_stride;  // elements
  int64_t chunk, head_size;
  Scale scale;
  Nvfp4Page page;
};

struct ReshapeAndCacheArgs {
  const char* report;  // "op: slot_mapping"
  DType dtype;         // of key and value: float32, float16 or bfloat16
  KvFormat format;
  CacheSide key, value;
  Index slots;  // [num_tokens]
  int64_t num_tokens, num_heads, num_blocks, block_size;
};

PYKV_CPU_TWIN(reshape_and_cache_cpu, ReshapeAndCacheArgs)
void reshape_and_cache_cuda(const ReshapeAndCacheArgs& args, const Launch& launch);

}  // namespace pykv
