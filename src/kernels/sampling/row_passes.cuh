// Passes over a row that a cluster of blocks shares, sums of what all of its threads found, and the search for the entry at which
// a sum of weights reaches a target.
#pragma once

#include "sampling/arithmetic.h"
#include "sampling/top_k_candidates.cuh"

namespace pykv {

constexpr int kBins = 2048, kBinsOfOctave = 32;

struct RowMemory {
  SelectMemory select;
  uint32_t bound_key, list_size;
  uint64_t parts[2][kSelectWarps], exchange[2];
  int bin;
  Mass before;
  Entry threshold;
  uint32_t bins_low[kBins], bins_high[kBins];  // sums of 64 bits
};

struct Larger {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Plus {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

// The threads of all blocks of a row.  Two sums that follow each other have different memory, as in BlockCounter.
class RowTeam {
 public:
  __device__ RowTeam(RowMemory& memory, int rank, int blocks) : memory_(memory), rank_(rank), blocks_(blocks) {}

  __device__ int rank() const { return rank_; }
  __device__ int blocks() const { return blocks_; }
  __device__ void barrier() const {
    if (blocks_ > 1) {
      cluster_barrier();
    } else {
      __syncthreads();
    }
  }

  // Over this block, and over all blocks; given to all threads.
  template <class Combine>
  __device__ uint64_t reduce_block(uint64_t x, Combine combine) {
    use_ ^= 1;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    if (threadIdx.x % 32 == 0) memory_.parts[use_][threadIdx.x / 32] = x;
    __syncthreads();
    x = memory_.parts[use_][threadIdx.x % kSelectWarps];
#pragma unroll
    for (int distance = kSelectWarps / 2; distance > 0; distance /= 2)
      x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
  }
  template <class Combine>
  __device__ uint64_t reduce(uint64_t x, Combine combine) {
    x = reduce_block(x, combine);
    if (blocks_ == 1) return x;
    exchange_use_ ^= 1;  // its own: a block may have more sums of itself than another
    if (threadIdx.x == 0) memory_.exchange[exchange_use_] = x;
    cluster_barrier();
    x = load_from_block(&memory_.exchange[exchange_use_], 0);
    for (int rank = 1; rank < blocks_; ++rank) x = combine(x, load_from_block(&memory_.exchange[exchange_use_], rank));
    return x;
  }

  // The sum of those of the threads before this one in its block, and of all.
  __device__ uint64_t sum_before(uint64_t x, uint64_t& total) {
    use_ ^= 1;
    uint64_t sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t below = __shfl_up_sync(0xffffffffu, sum, distance);
      if (threadIdx.x % 32 >= distance) sum += below;
    }
    if (threadIdx.x % 32 == 31) memory_.parts[use_][threadIdx.x / 32] = sum;
    __syncthreads();
    uint64_t before = 0;
    total = 0;
    for (int warp = 0; warp < kSelectWarps; ++warp) {
      if (warp == static_cast<int>(threadIdx.x) / 32) before = total;
      total += memory_.parts[use_][warp];
    }
    return before + sum - x;
  }

 private:
  RowMemory& memory_;
  int rank_, blocks_, use_ = 0, exchange_use_ = 0;
};

// body(column of the first, the vector's logits), for the vectors of this thread; all threads of a warp come together.
template <int kVectors, class T, class Body>
__device__ void each_vector(const RowSlice<T>& slice, Body body) {
  constexpr int kSize = kPackSize<T>, kStep = kSelectThreads * kSize;
  for (int group = slice.first_vector; group < slice.end; group += kVectors * kStep) {
    Pack<T> raw[kVectors];
    const int first = group + static_cast<int>(threadIdx.x) * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = slice.load(first + v * kStep);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) body(first + v * kStep, to_floats(raw[v]));
  }
}

// body(logit, column) for the logits of this thread.
template <int kVectors = 1, class T, class Value, class Body>
__device__ void each_logit(const RowSlice<T>& slice, Value value, Body body) {
  each_vector<kVectors>(slice, [&](int first, const Vec<float, kPackSize<T>>& x) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i)
      if (first + i >= slice.begin && first + i < slice.end) body(value(x[i], first + i), first + i);
  });
}

// What entries are added up by, and how far: 1 for each, to k; or masses, to a share of all.
struct LogitWeights {
  bool are_counts;
  uint64_t k;
  float largest, scale, share;

  __device__ uint64_t of(float x) const { return are_counts ? 1 : mass_of(x, largest, scale); }
  __device__ uint64_t target(uint64_t total) const { return are_counts ? k : share_of(total, share); }
  // How far a logit lies below the largest, in bins; the last one has all that is further.
  __device__ int bin_of(float x) const {
    return min(__float2int_rz(__fmul_rn(-below(x, largest), scale * kBinsOfOctave)), kBins - 1);
  }
};

// The largest entry, not below `floor`, for which the weights of all entries from it on reach their target; `floor` where all
// together do not exceed it.  `entries` is memory for a list.
template <class T, class Weights, class Value>
__device__ Entry reach_target(RowTeam& team, RowMemory& memory, const RowSlice<T>& slice, Entry floor,
                              const Weights& weights, Entry* entries, int room, Value value) {
  const int thread = threadIdx.x;
  const auto each_entry = [&](auto body) {  // body(entry, logit), for those that count
    each_logit(slice, value, [&](float x, int column) {
      const Entry entry = entry_of(key_of_logit(x), static_cast<uint32_t>(column));
      if (entry >= floor) body(entry, x);
    });
  };
  for (int i = thread; i < kBins; i += kSelectThreads) memory.bins_low[i] = memory.bins_high[i] = 0;
  if (thread == 0) memory.select.count = 0;
  __syncthreads();
  each_entry([&](Entry, float x) {
    const uint64_t w = weights.of(x);
    if (w == 0) return;
    const int bin = weights.bin_of(x);
    const uint32_t low = static_cast<uint32_t>(w), before = atomicAdd(&memory.bins_low[bin], low);
    const uint32_t high = static_cast<uint32_t>(w >> 32) + (before + low < before);  // who makes it overflow, carries
    if (high != 0) atomicAdd(&memory.bins_high[bin], high);
  });
  team.barrier();
  constexpr int kOfThread = kBins / kSelectThreads;
  uint64_t sums[kOfThread], own = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int bin = thread * kOfThread + i;
    sums[i] = uint64_t{memory.bins_high[bin]} << 32 | memory.bins_low[bin];
    for (int other = 0; other < team.blocks(); ++other)
      if (other != team.rank())
        sums[i] += uint64_t{load_from_block(&memory.bins_high[bin], other)} << 32 |
                   load_from_block(&memory.bins_low[bin], other);
    own += sums[i];
  }
  uint64_t total;
  uint64_t before = team.sum_before(own, total);
  const uint64_t wanted = weights.target(total);
  if (total <= wanted) {
    team.barrier();  // nobody reads the sums of others any more
    return floor;
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    if (before < wanted && before + sums[i] >= wanted) {
      memory.bin = thread * kOfThread + i;
      memory.before = before;
    }
    before += sums[i];
  }
  __syncthreads();
  const int bin = memory.bin;
  const uint64_t missing = wanted - memory.before;

  // Which entry of this bin it is, a list can tell, if there is room for it; else more passes over the row.
  each_entry([&](Entry entry, float x) {
    if (weights.bin_of(x) != bin || weights.of(x) == 0) return;
    const uint32_t place = atomicAdd(&memory.select.count, 1u);
    if (place < static_cast<uint32_t>(room)) entries[place] = entry;
  });
  __syncthreads();
  const uint64_t count = memory.select.count;
  Entry found = 0;
  if (team.reduce(thread == 0 ? count : 0, Plus()) <= static_cast<uint64_t>(room)) {
    const int n = gather_lists(entries, static_cast<int>(count), team.rank(), team.blocks(), memory.list_size);
    if (team.rank() == 0) {
      Entry ones = ~Entry{0}, any = 0;
      for (int i = thread; i < n; i += kSelectThreads) {
        ones &= entries[i];
        any |= entries[i];
      }
      ones = team.reduce_block(ones, [](uint64_t a, uint64_t b) { return a & b; });
      any = team.reduce_block(any, [](uint64_t a, uint64_t b) { return a | b; });
      found = ones;  // without the bits in which entries differ
      for (int bit = 63; bit >= 0; --bit) {
        const Entry one = Entry{1} << bit;
        if (((ones ^ any) & one) == 0) continue;
        // Bits below the first differing one that all have belong to `found` all the same: no entry lies between.
        const Entry candidate = found | one;
        uint64_t sum = 0;
        for (int i = thread; i < n; i += kSelectThreads)
          if (entries[i] >= candidate) sum += weights.of(logit_of_key(key_of(entries[i])));
        if (team.reduce_block(sum, Plus()) >= missing) found = candidate;
      }
      if (thread == 0) memory.threshold = found;
    }
    team.barrier();
    if (team.rank() != 0) found = load_from_block(&memory.threshold, 0);
  } else {
    for (int bit = 63; bit >= 0; --bit) {
      const Entry candidate = found | Entry{1} << bit;
      uint64_t sum = 0;
      each_entry([&](Entry entry, float x) {
        if (entry >= candidate && weights.bin_of(x) == bin) sum += weights.of(x);
      });
      if (team.reduce(sum, Plus()) >= missing) found = candidate;
    }
  }
  team.barrier();  // nobody reads the memory of others any more
  return found;
}

}  // namespace pykv
