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

// The same in a loop, with up to four uses a turn.  Addresses are worked out once, and turns alternate between two places,
// since a slow warp may still read what the turn before left.  A maximum is of numbers, not NaN.
class BlockReducer {
 public:
  __device__ explicit BlockReducer(int warps) : warps_(warps) {
    __shared__ alignas(1024) float memory[2][4][32];
    const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    const uint32_t lane = threadIdx.x % 32;
    write_ = base + threadIdx.x / 32 * 4;
    read_ = base + (lane & (warps - 1)) * 4;
    asm volatile("" : "+r"(write_), "+r"(read_));  // to stay in registers
  }
  template <int kUse, class Combine>
  __device__ float reduce(float v, Combine combine) const {
    v = all<32>(v, combine);
    if (threadIdx.x % 32 == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(write_ + kUse * 128), "f"(v) : "memory");
    __syncthreads();
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(read_ + kUse * 128) : "memory");
    return all<0>(v, combine);
  }
  __device__ void next_turn() {
    write_ ^= 512;
    read_ ^= 512;
  }

 private:
  template <int kWidth>
  __device__ float all(float v, Sum combine) const {
    return warp_reduce(v, kWidth ? kWidth : warps_, combine);
  }
  template <int kWidth>
  __device__ float all(float v, Maximum) const {  // floats >= 0 compare as integers
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v)));
  }

  int warps_;
  uint32_t write_, read_;
};

template <int kWidth>
__device__ float warp_sum(float v) {
  return warp_reduce(v, kWidth, Sum());
}
template <int kThreads>
__device__ float block_sum(float v) {  // once a kernel
  return block_reduce<0>(v, kThreads / 32, Sum());
}

}  // namespace pykv
