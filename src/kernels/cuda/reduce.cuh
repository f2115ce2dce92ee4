// Reductions over threads, always in the same order, given to all threads that take part; and sums of those before each.
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

// Of this lane and those before it.  All lanes of the warp must call it.
template <class T>
__device__ T inclusive_sum(T x) {
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, x, distance);
    if (threadIdx.x % 32 >= distance) x += below;
  }
  return x;
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

// The same, with up to four uses in a kernel.  Addresses are worked out once.  A maximum is of numbers, not NaN.
class BlockReducer {
 public:
  __device__ explicit BlockReducer(int warps) : warps_(warps) {
    __shared__ alignas(512) float memory[4][32];
    const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    write_ = base + threadIdx.x / 32 * 4;
    asm volatile("" : "+r"(write_));  // to stay in a register
  }
  template <int kUse, class Combine>
  __device__ float reduce(float v, Combine combine) const {
    v = all<32>(v, combine);
    if (threadIdx.x % 32 == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(write_ + kUse * 128), "f"(v) : "memory");
    return all<0>(read<kUse>(warps_), combine);
  }
  // The sums of kSplit times as many warps as there are, each having kSplit: that of warp + i * kWarps in the lanes whose
  // highest bits are i.
  template <int kUse, int kWarps, int kSplit>
  __device__ float sum_of_parts(float v) const {
    write_parts<kUse, kWarps, kSplit>(v);
    return warp_reduce(read<kUse>(kWarps * kSplit), kWarps * kSplit, Sum());
  }
  // The same of two rows, the first kSplit / 2 numbers of a warp being of the first.
  template <int kUse, int kWarps, int kSplit>
  __device__ float2 sums_of_two(float v) const {
    constexpr int kEach = kWarps * kSplit / 2;
    write_parts<kUse, kWarps, kSplit>(v);
    const float sum = warp_reduce(read<kUse>(2 * kEach), kEach, Sum());
    return {__shfl_sync(0xffffffffu, sum, 0), __shfl_sync(0xffffffffu, sum, kEach)};
  }

 private:
  template <int kUse, int kWarps, int kSplit>
  __device__ void write_parts(float v) const {
    constexpr int kLanes = 32 / kSplit;
    const uint32_t lane = threadIdx.x % 32;
    if (lane % kLanes == 0)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(write_ + kUse * 128 + lane / kLanes * (kWarps * 4)), "f"(v)
                   : "memory");
  }
  // Of the first so many warps one each, after a barrier.
  template <int kUse>
  __device__ float read(int warps) const {
    float v;
    const uint32_t at = (write_ & ~127u) + (threadIdx.x & (warps - 1)) * 4;
    __syncthreads();
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at + kUse * 128) : "memory");
    return v;
  }
  template <int kWidth>
  __device__ float all(float v, Sum combine) const {
    return warp_reduce(v, kWidth ? kWidth : warps_, combine);
  }
  template <int kWidth>
  __device__ float all(float v, Maximum) const {  // floats >= 0 compare as integers
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v)));
  }

  int warps_;
  uint32_t write_;
};

template <int kWidth>
__device__ float warp_sum(float v) {
  return warp_reduce(v, kWidth, Sum());
}

}  // namespace pykv
