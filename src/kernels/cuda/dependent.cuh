// Programmatic dependent launch (sm_90 and later): a kernel comes up while the one before it in the stream still runs.
#pragma once

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

}  // namespace pykv
