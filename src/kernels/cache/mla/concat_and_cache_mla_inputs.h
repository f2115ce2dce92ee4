// The arrays of the ops that write rows into MLA caches, checked.
#pragma once

#include "cache/mla/concat_and_cache_mla.h"
#include "core/call.h"

namespace pykv {

struct ConcatAndCacheMlaInputs {
  const DLTensor *kv_c, *k_pe;
  DLTensor* kv_cache;
  const DLTensor* slot_mapping;
  const char* kv_cache_dtype;
  const char* scale_name;
  const DLTensor* scale;
  bool skip_scale;  // 1 in its place
};

// Fills args, all but `report`.
void take_inputs(ConcatAndCacheMlaArgs& args, Call& call, const ConcatAndCacheMlaInputs& inputs);

}  // namespace pykv
