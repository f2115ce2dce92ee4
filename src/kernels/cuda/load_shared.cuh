// What store_shared (cuda/mma.cuh) has stored, or an asynchronous copy: by its address in shared memory, or in that of a cluster.
#pragma once

#include <cstdint>

namespace pykv {

__device__ inline uint4 load_shared_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ inline uint2 load_shared_8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ inline uint32_t load_shared_4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ inline uint32_t load_shared_2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}
__device__ inline float4 load_shared_float4(uint32_t at) {
  const uint4 v = load_shared_16(at);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ inline float2 load_shared_float2(uint32_t at) {
  const uint2 v = load_shared_8(at);
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// at: cluster_address() of what lies in one of its blocks (sm_90).
__device__ inline float4 load_cluster_float4(uint32_t at) {
  float4 v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(at)
               : "memory");
#endif
  return v;
}

}  // namespace pykv
