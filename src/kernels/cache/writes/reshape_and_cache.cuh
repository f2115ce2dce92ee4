// The plan of the reshape_and_cache kernel.
#pragma once

#include "cache/mover.cuh"
#include "cache/slot_map.cuh"
#include "cache/writes/reshape_and_cache.h"
#include "cuda/ahead.cuh"

namespace pykv {

// What each block sends for, to L2: `units` pieces of `bytes`, `step` from one to the next through all blocks, up to `end` bytes
// from where keys or values begin.  Multiples of 16, all.
struct Share {
  int64_t step, end;
  uint32_t bytes, units;  // no units: nothing

  int64_t size() const { return int64_t{bytes} * units; }
};

// Keys or values of the call, everything in bytes, the head cut into vectors of the kernel's width.
struct SidePlan {
  const char* data;
  char* cache;
  int64_t data_token, data_head, data_vector;
  int64_t block, token, head, chunk;  // distances in the cache
  Divider vectors_per_head, vectors_per_chunk;
  uint32_t num_vectors, head_size;
  uint32_t num_blocks;  // of the grid, that work on this side
  uint32_t lanes_log2;  // neighbouring threads (transposing: warps) that take neighbouring vectors of a token
  Divider pieces;       // blocks over the width of a token (transposing: of a head)
  uint32_t tokens;      // of a thread: at most as many as it is compiled for
  Share share;
  // Transposing only.
  Divider heads;
  uint32_t tile_tokens_log2;
  uint32_t run;         // tokens stored at once: a power of two; 0: do not transpose
  uint32_t group_log2;  // tokens of a group of the cache: none shares a run with another
  int64_t group;        // bytes from group to group
  Nvfp4Page page;       // nvfp4 only
  bool four_over_six;   // likewise
};

struct Plan {
  SlotMap map;
  SidePlan key, value;
  uint32_t ahead;  // each block sends for the share of the one so many later; 0: it does not
  bool early;      // the first ones send for their own before they wait
};

// Sends for the share of a block, which need not be this one.
__device__ __forceinline__ void prefetch_share(const SidePlan& side, uint32_t block) {
  if (threadIdx.x >= side.share.units) return;
  const int64_t at = (int64_t{block} * side.share.units + threadIdx.x) * side.share.step, rest = side.share.end - at;
  if (rest > 0) prefetch_row(side.data + at, rest < side.share.bytes ? static_cast<uint32_t>(rest) : side.share.bytes);
}

}  // namespace pykv
