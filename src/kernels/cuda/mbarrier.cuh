// Barriers in shared memory (sm_90) that count arrivals, and named barriers for some of a block's threads.
#pragma once

#include <cstdint>

namespace pykv {

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What this thread did before can be seen by whoever waits.
__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Has the phase of this parity ended?  The phase before the first counts as ended, and has parity 1.
__device__ inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(ended)
               : "r"(barrier), "r"(parity)
               : "memory");
  return ended != 0;
}

__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

// Makes initialised barriers, or data written by ordinary stores and cp.async, visible to the asynchronous units.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until so many threads, multiples of a warp, have come to the barrier; arriving alone does not wait.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Waits, too: does one of them say so?
__device__ inline bool named_barrier_any(int id, int threads, bool x) {
  uint32_t any;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"(static_cast<uint32_t>(x)), "r"(id), "r"(threads)
               : "memory");
  return any != 0;
}

}  // namespace pykv
