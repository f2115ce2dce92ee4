// launch_dependent() of kernels that have memory shared by a block, of a size known when they are launched.
#pragma once

#include "cuda/dependent.cuh"

namespace pykv {

template <class... Parameters>
void launch_dependent_shared(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                             const Launch& launch, const char* op,
                             const std::type_identity_t<Parameters>&... parameters) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), op);
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream_of(launch);
  config.attrs = &overlap;
  config.numAttrs = overlaps_kernels(launch.device) ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, parameters...), op);
}

}  // namespace pykv
