// Memory between the kernels of a call.
#pragma once

#include "cuda/launch.h"

namespace pykv {

// Calls run(memory) with workspace, which may be given.  what: names it where there is none to be had.
template <class Run>
void with_workspace(void* given, int64_t bytes, const Launch& launch, const char* what, Run&& run) {
  if (given) return run(given);
  void* allocated = nullptr;
  cuda_check(cudaMallocAsync(&allocated, static_cast<size_t>(bytes), stream_of(launch)), what);
  try {
    run(allocated);
  } catch (...) {
    cudaFreeAsync(allocated, stream_of(launch));
    throw;
  }
  cuda_check(cudaFreeAsync(allocated, stream_of(launch)), what);
}

}  // namespace pykv
