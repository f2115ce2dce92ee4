// The plan of the reshape_and_cache kernel.
#pragma once

#include "cache/mover.cuh"
#include "cache/reshape_and_cache.h"
#include "cache/slot_map.cuh"

namespace pykv {

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
  // Transposing only.
  Divider heads;
  uint32_t tile_tokens_log2;
  uint32_t run;    // tokens stored at once: a power of two; 0: do not transpose
  Nvfp4Page page;  // nvfp4 only
};

struct Plan {
  SlotMap map;
  SidePlan key, value;
};

}  // namespace pykv
