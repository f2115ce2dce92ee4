// Where the entry of a token lies in an MLA cache.
#pragma once

#include "cache/mla/concat_and_cache_mla.h"
#include "cache/slot_map.cuh"
#include "core/error.h"
#include "cuda/vec.cuh"

namespace pykv {

struct SlotTarget {
  SlotMap map;
  char* cache;
  int64_t block, token;  // bytes

  __device__ void prefetch_ids(uint32_t first, uint32_t) const { map.prefetch_slot(first); }
  template <int kRows>
  __device__ Slots<kRows> ids(uint32_t first, uint32_t end) const {
    return map.load<kRows>(first, 1, end);
  }
  template <int kRows>
  __device__ char* place(const Slots<kRows>& slots, int i) const {
    int64_t page;
    uint32_t offset;
    return map.locate(map.slot(slots, i), page, offset) ? cache + page * block + offset * token : nullptr;
  }
  template <class V>
  static __device__ void store(char* to, const V& v) {
    store_vec(to, v);
  }
};

inline SlotMap slot_map_of(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  if (args.block_size >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "blocks of 2^31 tokens are not supported");
  return slot_map_of(args.slots, args.num_tokens, args.num_blocks, args.block_size, launch.reporter(args.report));
}

inline SlotTarget target_of(const ConcatAndCacheMlaArgs& args, int64_t stored_size, const Launch& launch) {
  return {slot_map_of(args, launch), static_cast<char*>(args.cache), args.block * stored_size,
          args.token * stored_size};
}

}  // namespace pykv
