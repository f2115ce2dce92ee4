// How many clusters find room at once; those larger than eight blocks, not on every chip.
#pragma once

#include <atomic>
#include <bit>

#include "cuda/launch.h"

namespace pykv {

// How many clusters of so many blocks of a kernel there is room for at once: 0 where the chip has none.  It is asked once on each
// device, so that a kernel always has the same numbers.  The kernel is allowed such clusters, and so much shared memory.
template <auto kKernel>
int clusters_at_once(const Launch& launch, unsigned blocks, unsigned threads, int shared_bytes) {
  constexpr int kDevices = 64, kSizes = 6, kUnknown = -1;
  static std::atomic<int> knowns[kSizes][kDevices];  // 1 more; for powers of 2
  if (launch.device >= kDevices) return 0;
  std::atomic<int>& known = knowns[std::bit_width(blocks) - 1][launch.device];
  int clusters = known.load(std::memory_order_relaxed) - 1;
  if (clusters == kUnknown) {
    cudaLaunchAttribute size;
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {blocks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &size;
    config.numAttrs = 1;
    if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess ||
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config) != cudaSuccess) {
      clusters = 0;
      cudaGetLastError();  // nobody else is to find it
    }
    known.store(clusters + 1, std::memory_order_relaxed);
  }
  return clusters;
}

}  // namespace pykv
