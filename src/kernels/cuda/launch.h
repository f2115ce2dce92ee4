// CUDA calls that fail become exceptions at once.
#pragma once

#include <cuda_runtime.h>

#include "core/error.h"
#include "core/launch.h"

namespace pykv {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call starts clean
  const bool missing = status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction;
  fail(missing ? PYKV_NOT_IMPLEMENTED : PYKV_RUNTIME_ERROR, "%s: %s%s", what, cudaGetErrorString(status),
       missing ? " (build pykv with PYKV_CUDA_ARCHS for this GPU)" : "");
}

inline void check_launch(const char* what) { cuda_check(cudaGetLastError(), what); }

inline cudaStream_t stream_of(const Launch& launch) { return static_cast<cudaStream_t>(launch.stream); }

}  // namespace pykv
