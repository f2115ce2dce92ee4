// Programmatic dependent launch (sm_90 and later): a kernel comes up while the one before it in the stream still runs.
//
// Every thread of such a kernel waits before it reads or writes memory, and before it returns: the kernel after it takes the end
// of this one for the end of all before.  (Not if all blocks of the one before have waited before this one's come up, and have
// written nothing: attention/cuda/problem.cuh, takes_call().)
#pragma once

#include <type_traits>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace pykv {

// Lets the next kernel's blocks come up as soon as all of this kernel's are running; they still wait for its results.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one has finished and its writes can be seen.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings what lies at `p` into L2, where it may be changed: the one thing that may be asked of memory before the wait.
// Where that is may be guessed by what __ldcg finds then, which leaves nothing in the L1.
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// What a kernel begins with that launch_dependent launches.  In this order: blocks of the next kernel that came up while
// this one still waits would find room on few SMs, and all stay there (records of 4096 tokens on an H200: 6.8 us, not 5.3).
__device__ inline void begin_dependent() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

// Whether a block is one of the first, which come up while the kernel before still runs and have time to prefetch: so many,
// where they are small more.
__device__ inline bool comes_early([[maybe_unused]] uint32_t blocks = 1024) {
#if __CUDA_ARCH__ >= 900
  return blockIdx.x < blocks;
#else
  return false;
#endif
}

// Has a number ready at this point: what is worked out before the wait costs nothing while another kernel runs.
__device__ inline void have_ready(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void have_ready(int64_t& x) { asm volatile("" : "+l"(x)); }
template <class T>
__device__ inline void have_ready(T*& x) {
  asm volatile("" : "+l"(x));
}

// Launches a kernel that begins with begin_dependent().
template <class... Parameters>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, const Launch& launch, const char* op,
                      const std::type_identity_t<Parameters>&... parameters) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream_of(launch);
  config.attrs = &overlap;
  config.numAttrs = overlaps_kernels(launch.device) ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, parameters...), op);
}

}  // namespace pykv
