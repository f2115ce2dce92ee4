// From slots to places in a paged cache.
#pragma once

#include "core/args.h"
#include "cuda/divider.cuh"

namespace pykv {

// Where tokens go.
struct SlotMap {
  Index slots;
  int64_t num_tokens, num_slots;
  Divider block_size;
  bool wide;  // 2^31 slots or more
  Reporter report;

  // False for padding and for a slot outside the cache, which is reported.
  __device__ bool locate(int64_t slot, int64_t& block, uint32_t& offset) const {
    if (slot < 0) return false;
    if (slot >= num_slots) {
      report(slot, num_slots);
      return false;
    }
    if (wide) {
      block = slot / block_size.d;
      offset = static_cast<uint32_t>(slot % block_size.d);
    } else {
      block = block_size(static_cast<uint32_t>(slot), offset);
    }
    return true;
  }
};

}  // namespace pykv
