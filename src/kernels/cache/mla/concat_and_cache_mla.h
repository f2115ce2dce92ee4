// Latent vectors and rotated keys into their slots of an MLA cache.  The idea behind pykv_concat_and_cache_mla.
#pragma once

#include "core/args.h"
#include "core/nvfp4.h"
#include "cpu/isa.h"

namespace pykv {

// Rows of one input: element d of row t lies at data + t * row + d * dim.  Null data: zeros, for the rope of records.
struct MlaPart {
  const void* data;
  int64_t row, dim, size;  // elements
};

// What a token's place in the cache holds.
enum class MlaEntry : uint8_t {
  kPlain,        // latent, then rope, in one format
  kRecord,       // fp8_ds_mla (cache/mla_record.h)
  kNvfp4Record,  // nvfp4_ds_mla (likewise)
};

struct ConcatAndCacheMlaArgs {
  const char* report = nullptr;  // "op: slot_mapping"
  DType dtype{};                 // of both parts
  MlaEntry entry{};
  KvFormat format{};
  MlaPart latent{}, rope{};
  void* cache = nullptr;
  int64_t block = 0, token = 0, dim = 0;  // distances in the cache: elements of the cache
  Scale scale;
  Nvfp4Page page{};            // nvfp4: as one head
  bool four_over_six = false;  // nvfp4: the better one of two scales for each block
  Index slots{};               // [num_tokens]
  int64_t num_tokens = 0, num_blocks = 0, block_size = 0;
};

PYKV_CPU_TWIN(concat_and_cache_mla_cpu, ConcatAndCacheMlaArgs)
void concat_and_cache_mla_cuda(const ConcatAndCacheMlaArgs& args, const Launch& launch);

}  // namespace pykv
