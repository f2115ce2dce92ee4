// Memory between the kernels of a layer.
#pragma once

#include "cuda/launch.h"

namespace pykv {

// Calls run(memory) with workspace, which may be given.
template <class Run>
void with_workspace(void* given, int64_t bytes, const Launch& launch, Run&& run) {
  if (given) return run(given);
  void* allocated = nullptr;
  cuda_check(cudaMallocAsync(&allocated, static_cast<size_t>(bytes), stream_of(launch)), "fused_moe: workspace");
  try {
    run(allocated);
  } catch (...) {
    cudaFreeAsync(allocated, stream_of(launch));
    throw;
  }
  cuda_check(cudaFreeAsync(allocated, stream_of(launch)), "fused_moe: workspace");
}

}  // namespace pykv
