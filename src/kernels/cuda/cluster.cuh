// Clusters of blocks (sm_90 and later): a barrier, and stores to each other's shared memory.  Before sm_90 each block is a
// cluster of its own.
#pragma once

#include <cstdint>

namespace pykv {

// Both must be reached by all threads of all blocks of the cluster; what was written before the arrival can be seen after
// the wait.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The address, in the cluster, of what lies in block `rank` where `address` lies in this block's shared memory.
__device__ inline uint32_t cluster_address(uint32_t address, int rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

__device__ inline void store_cluster(uint32_t address, float4 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
#else
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#endif
}

__device__ inline void store_cluster(uint32_t address, float2 x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
#else
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
#endif
}

}  // namespace pykv
