// Weights of logits, and their sums in bins that lie in the shared memory of all blocks of a row.
#pragma once

#include "sampling/arithmetic.h"
#include "sampling/row_team.cuh"

namespace pykv {

// How far a logit lies below the largest one, in bins; its share is 2^(-distance / kBinsOfOctave).  Only -infinity is infinitely
// far: of finite logits the product may overflow, and they count for top_k.
__device__ inline float bins_below(float x, float largest, float scale) {
  constexpr float kMost = 0x1.fffffep127f;
  return x > -INFINITY ? fminf(below(x, largest) * (-kBinsOfOctave * scale), kMost) : INFINITY;
}

// What entries are added up by, and how far: 1 for each, to k; or masses, to a share of all.
struct LogitWeights {
  bool are_counts;
  uint64_t k;
  float largest, scale, top_p;

  __device__ uint64_t target(uint64_t total) const { return are_counts ? k : share_of(total, top_p); }
  __device__ float share(float x) const { return share_of_largest(x, largest, scale); }
  __device__ float distance(float x) const { return bins_below(x, largest, scale); }
};

// Sums of 64 bits, in bins of shared memory.
__device__ inline void clear_bins(RowMemory& memory) {
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) memory.bins_low[i] = memory.bins_high[i] = 0;
  __syncthreads();
}
__device__ inline void add_to_bin(RowMemory& memory, int bin, uint64_t x) {
  const uint32_t low = static_cast<uint32_t>(x), before = atomicAdd(&memory.bins_low[bin], low);
  const uint32_t high = static_cast<uint32_t>(x >> 32) + (before + low < before);  // who makes it overflow, carries
  if (high != 0) atomicAdd(&memory.bins_high[bin], high);
}

// Adds up each bin over all blocks, in one of them: a block has kBins / blocks bins, four in each of its first threads.  The first
// block has those from place `origin` on, a multiple of 4; places are bins again and again.  When all blocks have told each other
// something after this, bins may be cleared.
struct OwnBins {
  int first;  // of this thread: how far from the origin
  int of_block, place;
  __device__ bool in_this_thread() const { return static_cast<int>(threadIdx.x) * 4 < of_block; }
};
template <bool kWide>
__device__ OwnBins add_bins_of_blocks(RowTeam& team, RowMemory& memory, int origin) {
  team.barrier();
  const int blocks = team.blocks(), of_block = kBins / blocks, first = team.rank() * of_block, thread = threadIdx.x;
  // So many vectors of four bins are to be read.
  constexpr int kVectors = kBins / 4;
  static_assert(kVectors <= kSelectThreads);
  const int which = thread * blocks / kVectors, at = (origin + first + (4 * thread & (of_block - 1))) & (kBins - 1);
  if (which != 0 && which < blocks) {
    const int rank = (team.rank() + which) & (blocks - 1);
    const uint4 low = load_from_block(&memory.bins_low[at], rank);
    uint4 high{};
    if constexpr (kWide) high = load_from_block(&memory.bins_high[at], rank);
    const auto add = [&](int i, uint32_t l, uint32_t h) {
      if constexpr (kWide) {
        add_to_bin(memory, at + i, uint64_t{h} << 32 | l);
      } else {
        atomicAdd(&memory.bins_low[at + i], l);
      }
    };
    add(0, low.x, high.x);
    add(1, low.y, high.y);
    add(2, low.z, high.z);
    add(3, low.w, high.w);
  }
  if (blocks > 1) __syncthreads();
  return {first + 4 * thread, of_block, (origin + first + 4 * thread) & (kBins - 1)};
}

// The bin of all blocks up to which they sum up to `wanted`, and the sum before it.
struct FoundBin {
  int bin;
  uint64_t before;
};
__device__ inline FoundBin find_bin(RowTeam& team, RowMemory& memory, uint64_t wanted) {
  const OwnBins own_bins = add_bins_of_blocks<true>(team, memory, 0);
  uint64_t sums[4] = {}, own = 0, total;
  if (own_bins.in_this_thread())
#pragma unroll
    for (int i = 0; i < 4; ++i)
      own += sums[i] = uint64_t{memory.bins_high[own_bins.place + i]} << 32 | memory.bins_low[own_bins.place + i];
  if (threadIdx.x == 0) memory.bin = -1;
  uint64_t before = team.sum_before(own, total);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < wanted && before + sums[i] >= wanted) {
      memory.bin = own_bins.first + i;
      memory.before = before;
    }
    before += sums[i];
  }
  __syncthreads();
  const FoundBin found{memory.bin, memory.before};
  if (team.blocks() == 1) {
    __syncthreads();  // all have read it
    return found;
  }
  const int bin = static_cast<int>(team.exchange().number_of_lane(static_cast<uint32_t>(found.bin + 1), 0));
  const uint64_t sum = team.exchange().number_of_lane(found.before, 0);
  const int finder = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, bin != 0))) - 1;
  return {__shfl_sync(0xffffffffu, bin, finder) - 1, __shfl_sync(0xffffffffu, sum, finder)};
}

}  // namespace pykv
