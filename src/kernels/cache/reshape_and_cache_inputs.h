// The arrays of the ops that write keys and values into caches, checked.
#pragma once

#include "cache/reshape_and_cache.h"
#include "core/call.h"

namespace pykv {

struct ReshapeAndCacheInputs {
  const DLTensor *key, *value;
  DLTensor *key_cache, *value_cache;
  const DLTensor* slot_mapping;
  const char* kv_cache_dtype;
  const DLTensor *k_scale, *v_scale;
  bool interleaved_v = false;  // of packed caches
};

// Fills args, all but `report`.
void take_inputs(ReshapeAndCacheArgs& args, Call& call, bool packed, const ReshapeAndCacheInputs& inputs);

}  // namespace pykv
