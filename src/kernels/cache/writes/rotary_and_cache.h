// Rotation of queries and keys in place, and rotated keys and values into their slots of a paged cache, at once.
#pragma once

#include "cache/writes/reshape_and_cache.h"
#include "core/rotation.h"

namespace pykv {

struct RotaryAndCacheArgs {
  Rotation rotation{};          // its key is that of the cache
  int64_t rope_dim_offset = 0;  // of its heads' rotated part
  ReshapeAndCacheArgs cache;    // for as many tokens as there are slots, at most those of the rotation
  bool in_dtype = false;        // the rotation is computed in the data's dtype, rounded at every step; else in fp32
  bool only_cached = false;     // tokens without a place in the cache are left as they are
  bool rotate_only = false;     // the cache is written by others
};

PYKV_CPU_TWIN(rotary_and_cache_cpu, RotaryAndCacheArgs)
void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, const Launch& launch);

}  // namespace pykv
