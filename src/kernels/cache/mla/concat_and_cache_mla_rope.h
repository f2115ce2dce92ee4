// Rotation of queries and of the keys that all heads share, and the keys with their latents into an MLA cache.  The idea
// behind pykv_concat_and_cache_mla_rope_fused.
#pragma once

#include "cache/mla/concat_and_cache_mla.h"
#include "cache/writes/rotary_and_cache.h"

namespace pykv {

struct ConcatAndCacheMlaRopeArgs {
  // A plain entry is a value of one head, the latent, with a key of one head behind it: rotary_and_cache does it all.  Of
  // other entries it rotates, and `concat` writes them.
  RotaryAndCacheArgs rotary;
  ConcatAndCacheMlaArgs concat;
};

PYKV_CPU_TWIN(concat_and_cache_mla_rope_cpu, ConcatAndCacheMlaRopeArgs)
void concat_and_cache_mla_rope_cuda(const ConcatAndCacheMlaRopeArgs& args, const Launch& launch);

}  // namespace pykv
