// Values and scales of the indexer's keys out of a block-planar cache, gathered request after request.  The idea behind
// pykv_cp_gather_indexer_k_quant_cache.
#pragma once

#include "cache/gathers/paged_requests.h"
#include "cache/indexer/indexer_block.h"
#include "cpu/isa.h"

namespace pykv {

// Rows to write: element i of row r, `bytes` bytes of it, lies at data + r * row + i * element; distances in bytes.
struct GatheredRows {
  void* data;
  int64_t row, element, bytes;

  // Whether all elements of a row lie side by side.
  bool compact() const { return element == bytes; }
};

struct GatherIndexerArgs {
  PagedRequests requests;
  const void* cache;
  int64_t block_bytes;  // from one block to the next
  IndexerBlock block;
  GatheredRows values, scales;
  int64_t num_rows;
};

PYKV_CPU_TWIN(gather_indexer_cache_cpu, GatherIndexerArgs)
void gather_indexer_cache_cuda(const GatherIndexerArgs& args, const Launch& launch);

}  // namespace pykv
