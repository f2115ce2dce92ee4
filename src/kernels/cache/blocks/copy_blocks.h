// Blocks of memory from one place to another, many at once: the kernel idea behind pykv_copy_blocks and
// pykv_copy_blocks_mla, and behind pykv_swap_blocks where both sides lie on one device.
#pragma once

#include "cache/blocks/block_mapping.h"
#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

// Block b is read at from + b * stride and written at to + b * stride.
struct BlockArray {
  const char* from;
  char* to;
};

// What a block is, in bytes: sizes[0] x sizes[1] x sizes[2] contiguous pieces.
struct BlockShape {
  int64_t stride;  // from one block to the next
  int64_t piece;   // bytes
  int64_t sizes[3], strides[3];

  int64_t num_pieces() const { return sizes[0] * sizes[1] * sizes[2]; }
  bool operator==(const BlockShape&) const = default;
};

struct CopyBlocksArgs {
  const BlockArray* arrays;
  int64_t num_arrays;
  BlockShape shape;

  // On the host: parts of rows that are independent of each other, to be copied one part after another.
  const BlockPair* pairs;
  const int64_t* part_ends;
  int64_t num_parts;

  // On the device, if pairs is null: rows that are copied at once.  Row i is (from[i], to[i]).
  const char* report;  // "op: block_mapping"
  Index from, to;
  int64_t num_pairs, num_blocks;
};

PYKV_CPU_TWIN(copy_blocks_cpu, CopyBlocksArgs)
void copy_blocks_cuda(const CopyBlocksArgs& args, const Launch& launch);

}  // namespace pykv
