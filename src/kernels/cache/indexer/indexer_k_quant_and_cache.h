// Keys of the indexer, quantised in groups with a scale each, into their slots of a block-planar cache.  The idea behind
// pykv_indexer_k_quant_and_cache.
#pragma once

#include "cache/indexer/indexer_block.h"
#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

// What is stored as the scale of a group, which has a place of four bytes.
enum class IndexerScale : uint8_t {
  kFloat,       // float32
  kPowerOfTwo,  // float32, rounded up to a power of two
  kExponent,    // its biased exponent, four times: a byte for each quarter of the group
};

struct IndexerKQuantArgs {
  DType dtype;
  const void* k;
  int64_t k_row, k_dim;  // elements
  void* cache;
  int64_t block_bytes;  // from one block to the next
  IndexerBlock block;
  int64_t group_size;
  IndexerScale scale;
  Index slots;  // [num_tokens]
  int64_t num_tokens, num_blocks;
};

PYKV_CPU_TWIN(indexer_k_quant_and_cache_cpu, IndexerKQuantArgs)
void indexer_k_quant_and_cache_cuda(const IndexerKQuantArgs& args, const Launch& launch);

}  // namespace pykv
