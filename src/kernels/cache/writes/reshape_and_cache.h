// New keys and values into their slots of a paged cache.  The layouts differ in strides alone, so that one kernel idea
// serves pykv_reshape_and_cache and pykv_reshape_and_cache_flash.
#pragma once

#include "core/args.h"
#include "core/nvfp4.h"
#include "cpu/isa.h"

namespace pykv {

// Keys or values: where they come from and where they go.  Element (b, o, h, d) of the cache lies at
//   b * block + o * token + h * head + (d / chunk) * chunk_stride + d % chunk
// with chunk = head_size for the flash layouts, x for packed keys and 1 for packed values.  Interleaved values are packed
// ones in groups of x tokens: o / x * group + o % x * token stands for o * token.  Of an nvfp4 cache only `cache`
// and `block` count, which is in bytes; the rest is said by `page`.
//
// Members have defaults so that args are made without `{}`, which would first clear all that their scales have room for.
struct CacheSide {
  const void* data = nullptr;                           // [num_rows, num_heads, head_size]
  int64_t data_token = 0, data_head = 0, data_dim = 0;  // elements
  void* cache = nullptr;
  int64_t block = 0, token = 0, head = 0, chunk_stride = 0;  // elements
  int64_t chunk = 0, head_size = 0;
  int64_t group = 0, group_tokens = 0;  // group_tokens 0: no groups; otherwise 4, 8 or 16
  Scale scale;
  Nvfp4Page page{};
  bool four_over_six = false;  // of nvfp4: the better one of two scales for each block
};

struct ReshapeAndCacheArgs {
  const char* report = nullptr;  // "op: slot_mapping"
  DType dtype{};                 // of key and value: float32, float16 or bfloat16
  KvFormat format{};
  CacheSide key, value;
  Index slots{};  // [num_tokens]
  int64_t num_tokens = 0, num_heads = 0, num_blocks = 0, block_size = 0;
};

PYKV_CPU_TWIN(reshape_and_cache_cpu, ReshapeAndCacheArgs)
void reshape_and_cache_cuda(const ReshapeAndCacheArgs& args, const Launch& launch);

}  // namespace pykv
