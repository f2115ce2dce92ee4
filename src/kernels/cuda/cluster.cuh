// Clusters of blocks (sm_90 and later): a barrier, and stores to each other's shared memory.  Only for kernels that were
// launched in clusters of two blocks or more.
#pragma once

#include <cstdint>

#include "cuda/mbarrier.cuh"

namespace pykv {

// An announcement and the wait must be reached by all threads of all blocks of the cluster: after the wait all blocks are there.
// Of what was written before, cluster_open() alone is sure to be seen; a release of everything takes as long as a fence of the
// whole device.
__device__ inline void cluster_announce() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The same, after which all is done that came before: the blocks may write to each other's shared memory again.
__device__ inline void cluster_announce_all() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A barrier in shared memory for bytes that blocks of the cluster, this one included, are going to send here: by one thread,
// before cluster_announce().
__device__ inline void cluster_open(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  mbarrier_init(barrier, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Its memory is free for something else, if nobody sends.
__device__ inline void cluster_close(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// How many they are; some may be there already.
__device__ inline void cluster_expect(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Waits until they are there.  parity: 0, and the other one each further time.
__device__ inline void cluster_receive(uint32_t barrier, int parity = 0) {
#if __CUDA_ARCH__ >= 900
  mbarrier_wait(barrier, parity);
#endif
}

// One arrival at a barrier of a block of the cluster, of which it has the address: for what this thread has read and written.
__device__ inline void cluster_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Waits for such arrivals at a barrier of this block.
__device__ inline void cluster_await([[maybe_unused]] uint32_t barrier, [[maybe_unused]] int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t ended = 0;
  while (ended == 0) {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

// The address, in the cluster, of what lies in block `rank` where `address` lies in this block's shared memory.
__device__ inline uint32_t cluster_address(uint32_t address, int rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

// Copies bytes, multiples of 16, from this block's shared memory to there; its barrier counts them as they arrive.  What other
// threads have stored needs a fence_async_proxy() of theirs and a barrier before.
__device__ inline void cluster_copy(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// Stores there; the barrier, of the same block, counts the bytes as they arrive.
__device__ inline void cluster_send(uint32_t address, float4 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
#endif
}

__device__ inline void cluster_send(uint32_t address, float2 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
#endif
}

}  // namespace pykv
