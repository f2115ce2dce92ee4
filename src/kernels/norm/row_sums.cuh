// What a norm finds out of a row: its sum, its sum of squares, its largest magnitude; of packs, of a thread's packs, of lanes
// and of all threads of the row.  Who adds what in which order follows from the number of threads alone.
#pragma once

#include <bit>
#include <type_traits>

#include "cuda/largest.cuh"
#include "cuda/pairs.cuh"
#include "cuda/quotient.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

template <int kSize>
__device__ float sum_of(const Vec<float, kSize>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum += v[i];
  return sum;
}
// Of the distances from `centre`, over the first `count` elements.
template <bool kCentred, int kSize>
__device__ float sum_of_squares(const Vec<float, kSize>& v, float centre, int count) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float x = kCentred ? (i < count ? v[i] - centre : 0.0f) : v[i];
    sum = fmaf(x, x, sum);
  }
  return sum;
}
// Of kCount numbers in each lane, a power of two, one: combined with those of other lanes, half of them handed over in each
// step.  Number i is left in the lanes that have i in their bits from `distance` down.
template <int kCount, class V, class Combine>
__device__ V dealt_out(V (&v)[kCount], int distance, Combine combine) {
#pragma unroll
  for (int count = kCount; count > 1; count /= 2, distance /= 2) {
    const bool high = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= count / 2) break;
      const V mine = high ? v[i + count / 2] : v[i], other = high ? v[i] : v[i + count / 2];
      v[i] = combine(mine, __shfl_xor_sync(0xffffffffu, other, distance));
    }
  }
  return v[0];
}

// Sums over lanes of kCount numbers each: number i is left in the lanes whose highest bits are i.
template <int kCount>
__device__ float warp_sums(float (&v)[kCount]) {
  float sum = dealt_out(v, 16, Sum());
#pragma unroll
  for (int distance = 16 / kCount; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

// The largest of each of kCount packs over `lanes` neighbouring lanes, not fewer than packs: that of pack i in the lanes
// whose lowest bits are i.  NaN where there is one.
template <class T, int kSize, int kCount>
__device__ float largest_of_one(const Vec<T, kSize> (&v)[kCount], int lanes) {
  constexpr int kPacks = std::bit_ceil(static_cast<unsigned>(kCount)), kInWord = 4 / sizeof(T);
  constexpr int kWords = kPacks > kInWord ? kPacks / kInWord : 1;
  const auto larger = [](uint32_t a, uint32_t b) { return larger_magnitudes_or_nan<T>(a, b); };
  const auto of_pack = [&](int k) {
    const auto& pack = reinterpret_cast<const Vec<uint32_t, kSize / kInWord>&>(v[k < kCount ? k : kCount - 1]);
    uint32_t most = pack[0];
#pragma unroll
    for (int i = 1; i < kSize / kInWord; ++i) most = larger(most, pack[i]);
    return most;
  };
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kInWord == 2) {
      const uint32_t a = of_pack(2 * i), b = of_pack(2 * i + 1);
      words[i] = larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    } else {
      words[i] = of_pack(i);
    }
  }
  uint32_t most = dealt_out(words, kPacks / 2, larger);
#pragma unroll
  for (int distance = kPacks / kWords / 2; distance > 0; distance /= 2)
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, distance));
#pragma unroll
  for (int distance = kPacks; distance < 32; distance *= 2)
    if (distance < lanes) most = larger(most, __shfl_xor_sync(0xffffffffu, most, distance));
  if constexpr (kInWord == 2) {
    const float2 pair = word_to_floats<T>(most & 0x7fff7fffu);
    return threadIdx.x & 1 ? pair.y : pair.x;
  } else {
    return fabsf(__uint_as_float(most));
  }
}

// (v - centre) * r.
template <bool kCentred, class T, int kSize>
__device__ Vec<float, kSize> normed(const Vec<T, kSize>& v, float centre, float r) {
  auto floats = to_floats(v);
#pragma unroll
  for (int i = 0; i < kSize; ++i) floats[i] = (kCentred ? floats[i] - centre : floats[i]) * r;
  return floats;
}

// Over the threads of a row, each standing for kSplit: kThreads; the whole block (0) or some lanes (less than 0), as many as
// the constructor is told.  Each use in a kernel has a number of its own.
template <int kThreads, int kSplit = 1>
class RowReducer {
 public:
  __device__ explicit RowReducer(int threads) : block_(threads / 32) {}
  template <int kUse>
  __device__ float sum(float (&v)[kSplit]) const {
    if constexpr (kSplit == 1) {
      return block_.reduce<kUse>(v[0], Sum());
    } else {
      return block_.template sum_of_parts<kUse, kThreads / 32, kSplit>(warp_sums(v));
    }
  }
  // Of two rows, half of v each.
  template <int kUse>
  __device__ float2 sums_of_two(float (&v)[kSplit]) const {
    return block_.template sums_of_two<kUse, kThreads / 32, kSplit>(warp_sums(v));
  }
  template <int kUse>
  __device__ float maximum(float v) const {
    return block_.reduce<kUse>(v, Maximum());
  }

 private:
  BlockReducer block_;
};
template <int kThreads, int kSplit>
  requires(kThreads < 0 || (kThreads > 0 && kThreads <= 32))
class RowReducer<kThreads, kSplit> {
 public:
  __device__ explicit RowReducer(int lanes) : lanes_(lanes) {}
  template <int kUse>
  __device__ float sum(float (&v)[kSplit]) const {
    float sum = kSplit == 1 ? warp_reduce(v[0], lanes_, Sum()) : warp_sums(v);
#pragma unroll
    for (int distance = 16; distance > 16 / kSplit; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
  }
  template <int kUse>
  __device__ float maximum(float v) const {
    return warp_reduce(v, lanes_, Maximum());
  }

 private:
  int lanes_;
};

// The mean of a row with this sum.  It is what a division would give, so that equal elements are their own mean: what is
// left of them would be multiplied by 1 / sqrt(epsilon).
__device__ inline float mean_of(float sum, int hidden_size, float inverse_size) {
  return corrected(sum * inverse_size, sum, static_cast<float>(hidden_size), inverse_size);
}

}  // namespace
}  // namespace pykv
