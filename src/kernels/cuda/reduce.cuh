// Reductions over threads, always in the same order, given to all threads that take part.
//
// Zero is neutral: lanes and warps that have nothing bring 0, and rows that are laid out over more threads than they need
// come to the same bits.
#pragma once

namespace pykv {

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {  // of numbers >= 0; NaN is passed over
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over `width` neighbouring lanes (a power of two up to 32).  All lanes of the warp must call it.
template <class Combine>
__device__ float warp_reduce(float v, int width, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    if (distance < width) v = combine(v, __shfl_xor_sync(0xffffffffu, v, distance));
  return v;
}

// Over a block of `warps` warps (a power of two).  One barrier; each call in a kernel has a kUse of its own, and so its own memory.
template <int kUse, class Combine>
__device__ float block_reduce(float v, int warps, Combine combine) {
  __shared__ float parts[32];
  v = warp_reduce(v, 32, combine);
  const int lane = threadIdx.x % 32;
  if (lane == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_reduce(parts[lane & (warps - 1)], warps, combine);
}

template <int kWidth>
__device__ float warp_sum(float v) {
  return warp_reduce(v, kWidth, Sum());
}
template <int kThreads>
__device__ float block_sum(float v) {  // once a kernel
  return block_reduce<0>(v, kThreads / 32, Sum());
}

}  // namespace pykv
