// From slots to places in a paged cache.
#pragma once

#include "cache/early.cuh"
#include "core/args.h"
#include "cuda/divider.cuh"

namespace pykv {

// Slots as they were loaded: put together at once, each would be waited for before the next is asked for.
template <int kTokens>
struct Slots {
  int32_t low[kTokens], high[kTokens];
};

__device__ inline int32_t load_word_in_order(const char* from) {
  int32_t word;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}

// Where tokens go.
struct SlotMap {
  Index slots;
  int64_t num_tokens, num_slots;
  Divider block_size;
  bool wide;  // 2^31 slots or more
  Reporter report;

  // Starts the loads of those of tokens first, first + step ... before `end`.
  template <int kTokens>
  __device__ Slots<kTokens> load(int64_t first, uint32_t step, int64_t end) const {
    Slots<kTokens> loaded;
    const int64_t item = slots.is_int64 ? 8 : 4;
    const int64_t next = step * slots.stride * item;
    const char* slot = static_cast<const char*>(slots.data) + first * slots.stride * item;
#pragma unroll
    for (int i = 0; i < kTokens; ++i, slot += next) {
      have_ready(slot);  // one addition from the last: not to be worked out from the first each time
      loaded.low[i] = loaded.high[i] = -1;
      if (first + i * step < end) {
        loaded.low[i] = *reinterpret_cast<const int32_t*>(slot);
        if (slots.is_int64) loaded.high[i] = *reinterpret_cast<const int32_t*>(slot + 4);
      }
    }
    return loaded;
  }

  __device__ const char* slot_at(int64_t token) const {
    return static_cast<const char*>(slots.data) + token * slots.stride * (slots.is_int64 ? 8 : 4);
  }

  // Of `count` neighbouring tokens, which is at least 1, from that at `slot` on; those beyond are the last one again.
  template <int kTokens>
  __device__ Slots<kTokens> load_some(const char* slot, int count) const {
    Slots<kTokens> loaded;
    const int64_t next = slots.stride * (slots.is_int64 ? 8 : 4);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      loaded.low[i] = load_word_in_order(slot);
      loaded.high[i] = slots.is_int64 ? load_word_in_order(slot + 4) : 0;
      if (i + 1 < count) slot += next;
    }
    return loaded;
  }

  // Whether these are as many neighbouring slots, of which the first is a multiple of their number, a power of two.
  template <int kTokens>
  __device__ bool follow(const Slots<kTokens>& loaded) const {
    uint32_t differ = loaded.low[0] & (kTokens - 1);
#pragma unroll
    for (int i = 1; i < kTokens; ++i)
      differ |= static_cast<uint32_t>(loaded.low[i] - loaded.low[0] - i) | (loaded.high[i] ^ loaded.high[0]);
    return differ == 0;
  }

  // What a thread may ask for before it waits: the slot of a token, and those that lie beside it.
  __device__ void prefetch_slot(int64_t token) const {
    if (token < num_tokens) prefetch(slot_at(token));
  }

  template <int kTokens>
  __device__ int64_t slot(const Slots<kTokens>& loaded, int i) const {
    return slots.is_int64 ? int64_t{loaded.high[i]} << 32 | static_cast<uint32_t>(loaded.low[i])
                          : int64_t{loaded.low[i]};
  }

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

inline SlotMap slot_map_of(const Index& slots, int64_t num_tokens, int64_t num_blocks, int64_t block_size,
                           const Reporter& report) {
  const int64_t num_slots = num_blocks * block_size;
  return {slots, num_tokens, num_slots, Divider(block_size), num_slots >= int64_t{1} << 31, report};
}

}  // namespace pykv
