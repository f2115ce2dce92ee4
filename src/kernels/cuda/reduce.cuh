// Sums over threads, always in the same order, given to all threads that take part.
#pragma once

namespace pykv {

// Over kWidth neighbouring lanes (a power of two up to 32).  All lanes of the warp must call it.
template <int kWidth>
__device__ float warp_sum(float v) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
  return v;
}

// Over a block of kThreads (a multiple of 64, at most 1024).  One barrier; call it once a kernel.
template <int kThreads>
__device__ float block_sum(float v) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float sums[kWarps];
  v = warp_sum<32>(v);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_sum<kWarps>(sums[threadIdx.x % kWarps]);
}

}  // namespace pykv
