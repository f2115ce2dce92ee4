// The arrays of the ops that write keys and values into caches, checked.
#pragma once

#include <cinttypes>

#include "cache/writes/reshape_and_cache.h"
#include "core/call.h"

namespace pykv {

struct ReshapeAndCacheInputs {
  const DLTensor *key, *value;
  DLTensor *key_cache, *value_cache;
  const DLTensor* slot_mapping;
  const char* kv_cache_dtype;
  const DLTensor *k_scale, *v_scale;
  struct {
    const char *key = "key", *value = "value", *key_cache = "key_cache", *value_cache = "value_cache";
  } names = {};
  bool interleaved_v = false;  // of packed caches
};

// [num_tokens, num_heads * head_size] seen as [num_tokens, num_heads, head_size]; other shapes as they are.
struct HeadsView {
  DLTensor tensor;
  int64_t shape[3], strides[3];

  HeadsView(const Tensor& x, const DLTensor& given, int64_t head_size) : tensor(given) {
    if (x.ndim() != 2) return;
    if (head_size == 0 || x.size(1) % head_size != 0)
      x.fail(PYKV_VALUE_ERROR, "the last dimension must be a multiple of head_size = %" PRId64 ", got shape %s",
             head_size, x.shape_string().c_str());
    tensor.ndim = 3;
    shape[0] = x.size(0), shape[1] = x.size(1) / head_size, shape[2] = head_size;
    strides[0] = x.stride(0), strides[1] = head_size * x.stride(1), strides[2] = x.stride(1);
    tensor.shape = shape;
    tensor.strides = strides;
  }
  HeadsView(const HeadsView&) = delete;
};

// Fills args, all but `report`.
void take_inputs(ReshapeAndCacheArgs& args, Call& call, bool packed, const ReshapeAndCacheInputs& inputs);

}  // namespace pykv
