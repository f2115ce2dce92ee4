// What kernels ask memory for before they wait for the kernel before them, beside what cuda/dependent.cuh has.
#pragma once

#include <cstdint>

#include "cuda/dependent.cuh"

namespace pykv {

// Where more blocks than these work at more than copies, they have others to hide their loads behind, and are better off
// without prefetching.
inline constexpr uint32_t kFewBlocks = 512;

// Brings [p, p + bytes) into L2 by one instruction, but for what of it is not 16 aligned bytes.
__device__ inline void prefetch(const void* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  const uint64_t address = reinterpret_cast<uint64_t>(p), first = (address + 15) & ~uint64_t{15};
  const uint32_t whole = static_cast<uint32_t>(((address + bytes) & ~uint64_t{15}) - first);
  if (static_cast<int32_t>(whole) > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(whole));
#endif
}

// An id, past L1: before the wait it may not be written yet, and is good for a guess of what to prefetch, but must not be kept.
__device__ inline int32_t load_id(const char* at) {
  int32_t word;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(word) : "l"(at));
  return word;
}

}  // namespace pykv
