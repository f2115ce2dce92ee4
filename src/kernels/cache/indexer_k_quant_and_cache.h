// Keys of the indexer, quantised in groups with a scale each, into their slots of a block-planar cache.  The idea behind
// pykv_indexer_k_quant_and_cache.
#pragma once

#include "cache/indexer_block.h"
#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct IndexerKQuantArgs {
  DType dtype;
  const void* k;
  int64_t k_row, k_dim;  // elements
  void* cache;
  int64_t block_bytes;  // from one block to the next
  IndexerBlock block;
  int64_t group_size;
  bool power_of_two;  // of the scales
  Index slots;        // [num_tokens]
  int64_t num_tokens, num_blocks;
};

PYKV_CPU_TWIN(indexer_k_quant_and_cache_cpu, IndexerKQuantArgs)
void indexer_k_quant_and_cache_cuda(const IndexerKQuantArgs& args, const Launch& launch);

}  // namespace pykv
