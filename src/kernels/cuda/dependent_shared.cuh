// launch_dependent() of kernels that have memory shared by a block, of a size known when they are launched, or come in clusters.
#pragma once

#include "cuda/dependent.cuh"

namespace pykv {

// In clusters of so many neighbouring blocks (more than one: sm_90), with memory that the kernel is allowed to have.
template <class... Parameters>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes,
                     const Launch& launch, const char* op, const std::type_identity_t<Parameters>&... parameters) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = !overlaps_kernels(launch.device) ? 0 : cluster > 1 ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, parameters...), op);
}

template <class... Parameters>
void launch_dependent_shared(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                             const Launch& launch, const char* op,
                             const std::type_identity_t<Parameters>&... parameters) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking)
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), op);
  launch_clusters(kernel, grid, block, 1, shared_bytes, launch, op, parameters...);
}

}  // namespace pykv
