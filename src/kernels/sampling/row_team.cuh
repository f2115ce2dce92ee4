// The blocks that share a row, and sums of what all of their threads found.
#pragma once

#include "sampling/top_k_candidates.cuh"

namespace pykv {

constexpr int kBins = 2048, kBinsOfOctave = 32;

struct TeamMemory {
  ExchangeMemory exchange;
  uint64_t parts[2][32];  // of each warp
};
struct RowMemory : TeamMemory {
  SelectMemory select;
  int bin, last_sure_bin;
  Mass before;
  alignas(16) uint32_t bins_low[kBins], bins_high[kBins];  // sums of 64 bits
};

struct Larger {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Plus {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

// The threads of all blocks of a row.  Two sums that follow each other have different memory: a thread that still reads the first
// has not come to the barrier of the second.  kWarps: of a block, up to 32.
template <int kWarps>
class RowTeamOf {
 public:
  __device__ RowTeamOf(TeamMemory& memory, int rank, int blocks)
      : memory_(memory), exchange_(memory.exchange, rank, blocks) {}
  __device__ void wait_for_blocks() const { exchange_.wait_for_blocks(); }

  __device__ RowExchange& exchange() { return exchange_; }
  __device__ int rank() const { return exchange_.rank(); }
  __device__ int blocks() const { return exchange_.blocks(); }
  __device__ void barrier() const {
    if (blocks() > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  // Over this block, and over all blocks, for which 0 is neutral; given to all threads.
  template <class Combine>
  __device__ uint64_t reduce_block(uint64_t x, Combine combine) {
    use_ ^= 1;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    if (threadIdx.x % 32 == 0) memory_.parts[use_][threadIdx.x / 32] = x;
    __syncthreads();
    x = part_of_lane();
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
  }
  template <class Combine>
  __device__ uint64_t reduce(uint64_t x, Combine combine) {
    x = reduce_block(x, combine);
    if (blocks() == 1) return x;
    x = exchange_.number_of_lane(x, 0);
#pragma unroll
    for (int distance = kMostBlocks / 2; distance > 0; distance /= 2)
      x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return __shfl_sync(0xffffffffu, x, 0);
  }

  // The sum of those of the threads before this one, in blocks before its own, too, and of all.
  __device__ uint64_t sum_before(uint64_t x, uint64_t& total) {
    const uint64_t before = sum_before_in_block(x, total);
    if (blocks() == 1) return before;
    const uint64_t of_lane = exchange_.number_of_lane(total, 0);
    return sum_of_lower(of_lane, rank(), total) + before;
  }
  __device__ uint64_t sum_before_in_block(uint64_t x, uint64_t& total) {
    use_ ^= 1;
    uint64_t sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t below = __shfl_up_sync(0xffffffffu, sum, distance);
      if (threadIdx.x % 32 >= distance) sum += below;
    }
    if (threadIdx.x % 32 == 31) memory_.parts[use_][threadIdx.x / 32] = sum;
    __syncthreads();
    return sum_of_lower(part_of_lane(), static_cast<int>(threadIdx.x) / 32, total) + sum - x;
  }

 private:
  // What the warp has found that this lane is called after; 0: none.
  __device__ uint64_t part_of_lane() const {
    const int lane = threadIdx.x % 32;
    return lane < kWarps ? memory_.parts[use_][lane] : 0;
  }
  // Of the lanes of a warp.
  static __device__ uint64_t sum_of_lower(uint64_t x, int lanes, uint64_t& total) {
    uint64_t lower = static_cast<int>(threadIdx.x) % 32 < lanes ? x : 0;
    total = x;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      lower += __shfl_xor_sync(0xffffffffu, lower, distance);
      total += __shfl_xor_sync(0xffffffffu, total, distance);
    }
    return lower;
  }

  TeamMemory& memory_;
  RowExchange exchange_;
  int use_ = 0;
};
using RowTeam = RowTeamOf<kSelectWarps>;

}  // namespace pykv
