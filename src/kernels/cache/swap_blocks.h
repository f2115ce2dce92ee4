// Blocks between the host and a device, or between two devices.
#pragma once

#include "cache/block_mapping.h"
#include "core/launch.h"

namespace pykv {

struct SwapBlocksArgs {
  const char* from;
  char* to;
  int from_device, to_device;  // CUDA ordinals; -1: the host
  int64_t block_bytes;
  const BlockPair* pairs;
  int64_t num_pairs;
};

// A copy on the stream for each run of rows whose blocks follow each other on both sides.
void swap_blocks_cuda(const SwapBlocksArgs& args, const Launch& launch);

}  // namespace pykv
