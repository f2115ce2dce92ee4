// How many clusters find room that are larger than those of eight blocks, which every chip with clusters has.
#pragma once

#include <atomic>

#include "cuda/launch.h"

namespace pykv {

// How many clusters of so many blocks of a kernel there is room for at once: 0 where the chip has none.  It is asked once on each
// device, so that a kernel always has the same numbers.  The kernel is allowed such clusters, and so much shared memory.
template <auto kKernel>
int large_clusters_at_once(const Launch& launch, unsigned blocks, unsigned threads, int shared_bytes) {
  constexpr int kDevices = 64, kUnknown = -1;
  static std::atomic<int> known[kDevices];  // 1 more
  if (launch.device >= kDevices) return 0;
  int clusters = known[launch.device].load(std::memory_order_relaxed) - 1;
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
    known[launch.device].store(clusters + 1, std::memory_order_relaxed);
  }
  return clusters;
}

}  // namespace pykv
