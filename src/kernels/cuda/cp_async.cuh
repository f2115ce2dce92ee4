// Asynchronous 16-byte copies from global to shared memory (sm_80 and later).
#pragma once

#include <cstdint>

namespace pykv {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zero bytes without reading `source` at all.
__device__ inline void cp_async_16(uint32_t destination, const void* source, bool read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(read ? 16 : 0)
               : "memory");
}

__device__ inline void cp_async_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// The same for what nobody will read again soon: in the L2 it makes room before anything else does.
__device__ inline void cp_async_16_once(uint32_t destination, const void* source, bool read) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(read ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ inline void cp_async_16_once(uint32_t destination, const void* source) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "l"(policy)
               : "memory");
}

// ... in rows that are no whole lines of 128 bytes, whose neighbours others read, or nobody: the half lines that are wanted.
__device__ inline void cp_async_16_of_row(uint32_t destination, const void* source, bool read) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::64B [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(read ? 16 : 0), "l"(policy)
               : "memory");
}

// kBytes, 4, 8 or 16, by way of the L1: for what lies in small pieces.
template <int kBytes>
__device__ inline void cp_async_small(uint32_t destination, const void* source, bool read) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(kBytes),
               "r"(read ? kBytes : 0)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives at a barrier (cuda/mbarrier.cuh) once this thread's copies up to here have landed.
__device__ inline void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until at most `kPending` of this thread's committed groups are still under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace pykv
