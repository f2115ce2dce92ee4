// Blocks between the host and a device, or between two devices: the kernel idea behind pykv_swap_blocks and
// pykv_swap_blocks_layers.
#pragma once

#include "cache/blocks/block_mapping.h"
#include "cache/blocks/copy_blocks.h"
#include "core/launch.h"

namespace pykv {

struct SwapBlocksArgs {
  const BlockArray* arrays;
  int64_t num_arrays;
  int from_device, to_device;  // CUDA ordinals; -1: the host
  int64_t block_bytes;
  const BlockPair* pairs;
  int64_t num_pairs;
  const int64_t* part_ends;  // rows that are independent of each other
  int64_t num_parts;
};

void swap_blocks_cuda(const SwapBlocksArgs& args, const Launch& launch);

}  // namespace pykv
