// Ranges of memory from anywhere to anywhere, by their addresses.  The kernel idea behind pykv_swap_blocks_batch.
#pragma once

#include <vector>

#include "core/launch.h"
#include "cpu/isa.h"

namespace pykv {

struct Transfer {
  const char* from;
  char* to;
  int64_t bytes;  // at least 1
  int64_t end;    // bytes of all transfers up to this one
};

struct SwapBlocksBatchArgs {
  const Transfer* transfers;
  int64_t num_transfers;  // at least 1
};

// The CUDA device that has to do it: that of `stream`, else that of the first address on a device; -1 if there is neither.
int device_of_transfers(const std::vector<Transfer>& transfers, void* stream);

PYKV_CPU_TWIN(swap_blocks_batch_cpu, SwapBlocksBatchArgs)
void swap_blocks_batch_cuda(const SwapBlocksBatchArgs& args, const Launch& launch);

}  // namespace pykv
