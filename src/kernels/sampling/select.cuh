// Entries (logit_order.h) in the shared memory of a block: the first k of them, and their order.
//
// All threads of the block call these together, with what they read in place behind a barrier; each ends with one.
#pragma once

#include <cstdint>

#include "sampling/logit_order.h"

namespace pykv {

constexpr int kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;

// Sums of a block in one barrier each.  Two that follow each other have different memory: a thread that still reads the first
// has not come to the barrier of the second.
struct BlockCounter {
  uint32_t parts[2][kSelectWarps], lows[kSelectWarps];

  // The largest x, and one that `wanted` are not below, 1 to kSelectThreads: the least of all, or of what is the largest in a
  // warp.  The next sum's use is 0.
  __device__ void ends(uint32_t x, uint32_t wanted, uint32_t& largest, uint32_t& low) {
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, x);
    const uint32_t low_of_warp = wanted <= kSelectWarps ? of_warp : __reduce_min_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) {
      parts[1][threadIdx.x / 32] = of_warp;
      lows[threadIdx.x / 32] = low_of_warp;
    }
    __syncthreads();
    largest = __reduce_max_sync(0xffffffffu, parts[1][threadIdx.x % kSelectWarps]);
    low = __reduce_min_sync(0xffffffffu, lows[threadIdx.x % kSelectWarps]);
  }

  __device__ uint32_t sum(uint32_t x, int use) {
    x = __reduce_add_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) parts[use & 1][threadIdx.x / 32] = x;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, threadIdx.x % 32 < kSelectWarps ? parts[use & 1][threadIdx.x % 32] : 0);
  }
};

constexpr int kSelectBits = 10, kSelectBins = 1 << kSelectBits;  // of a step of bound_of_first

struct SelectMemory {
  BlockCounter counter;
  Entry all[kSelectWarps], any[kSelectWarps];
  uint32_t digit, with_digit, before;
  uint32_t parts[kSelectWarps];
  uint32_t bins[kSelectBins];
  uint32_t count;  // not beside the digit: loads of that take its neighbours along, while this may be set again already
};

// The sum of those of the threads before this one.  A barrier lies between two that follow each other.
__device__ inline uint32_t sum_before(uint32_t x, SelectMemory& memory, uint32_t& total) {
  uint32_t sum = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 >= distance) sum += below;
  }
  if (threadIdx.x % 32 == 31) memory.parts[threadIdx.x / 32] = sum;
  __syncthreads();
  const uint32_t part = threadIdx.x % 32 < kSelectWarps ? memory.parts[threadIdx.x % 32] : 0;
  total = __reduce_add_sync(0xffffffffu, part);
  return __reduce_add_sync(0xffffffffu, threadIdx.x % 32 < threadIdx.x / 32 ? part : 0) + sum - x;
}

// Nearly the largest t with at least `wanted` of count(t) = how many are >= t, between such a t and one with less; a count of up to
// `enough` ends it early, and so does a distance of 2^12.  count(t) is that of this thread.
template <class Count>
__device__ uint32_t largest_bound(uint32_t t, uint32_t too_large, uint32_t wanted, uint32_t enough,
                                  BlockCounter& counter, Count count) {
#pragma unroll 1
  for (int step = 0; too_large - t > 1u << 12; ++step) {
    const uint32_t middle = t + (too_large - t) / 2, total = counter.sum(count(middle), step);
    if (total < wanted) {
      too_large = middle;
    } else {
      t = middle;
      if (total <= enough) break;
    }
  }
  __syncthreads();  // the counter may be used again
  return t;
}

// The smallest of the first `wanted` of n different entries, or a number between it and the next one.  Each step counts how many
// entries have which of their first bits that differ, and goes on with those among which the bound lies.
__device__ inline Entry bound_of_first(const Entry* entries, int n, int wanted, SelectMemory& memory) {
  if (n <= wanted) return 0;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  Entry bound = 0;
  int known = 0;  // bits of it, from the highest one
  uint32_t missing = static_cast<uint32_t>(wanted);
  while (true) {
    const auto in_question = [&](Entry entry) { return known == 0 || (entry ^ bound) >> (64 - known) == 0; };
    Entry all = ~Entry{0}, any = 0;
    for (int i = thread; i < n; i += kSelectThreads) {
      const Entry entry = entries[i];
      if (!in_question(entry)) continue;
      all &= entry;
      any |= entry;
    }
    all = Entry{__reduce_and_sync(0xffffffffu, key_of(all))} << 32 |
          __reduce_and_sync(0xffffffffu, static_cast<uint32_t>(all));
    any = Entry{__reduce_or_sync(0xffffffffu, key_of(any))} << 32 |
          __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(any));
    if (lane == 0) {
      memory.all[warp] = all;
      memory.any[warp] = any;
    }
    for (int i = thread; i < kSelectBins; i += kSelectThreads) memory.bins[i] = 0;
    __syncthreads();
#pragma unroll
    for (int other = 0; other < kSelectWarps; ++other) {
      all &= memory.all[other];
      any |= memory.any[other];
    }
    if (all == any) return all;  // a single one
    const int top = 63 - __clzll(static_cast<long long>(all ^ any)), last = max(top - kSelectBits + 1, 0);
    const uint32_t mask = (2u << (top - last)) - 1u;
    for (int i = thread; i < n; i += kSelectThreads) {
      const Entry entry = entries[i];
      if (in_question(entry)) atomicAdd(&memory.bins[static_cast<uint32_t>(entry >> last) & mask], 1u);
    }
    __syncthreads();
    // A thread's digits follow each other, the largest ones first.
    constexpr int kOfThread = kSelectBins / kSelectThreads;
    uint32_t counts[kOfThread], own = 0, total;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) own += counts[i] = memory.bins[kSelectBins - 1 - (thread * kOfThread + i)];
    uint32_t before = sum_before(own, memory, total);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (before < missing && before + counts[i] >= missing) {
        memory.digit = static_cast<uint32_t>(kSelectBins - 1 - (thread * kOfThread + i));
        memory.before = before;
        memory.with_digit = counts[i];
      }
      before += counts[i];
    }
    __syncthreads();
    bound = (any >> top >> 1 << top << 1) | Entry{memory.digit} << last;
    missing -= memory.before;
    if (missing == memory.with_digit) return bound;
    known = 64 - last;
    __syncthreads();  // what is in memory has been read
  }
}

// Keeps entries that are not below t, in any order, and gives their number.
__device__ inline int keep_not_below(Entry t, Entry* entries, int n, SelectMemory& memory) {
  if (threadIdx.x == 0) memory.count = 0;
  // What is kept goes to places before those that are read next.
  for (int first = 0; first < n; first += kSelectThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const Entry entry = i < n ? entries[i] : 0;
    __syncthreads();
    if (i < n && entry >= t) entries[atomicAdd(&memory.count, 1u)] = entry;
  }
  __syncthreads();
  return static_cast<int>(memory.count);
}

constexpr int kFewEntries = 256;

// Sorts n different entries, the largest first.  Up to the power of two that is not below n, `entries` has room.
__device__ inline void sort_entries(Entry* entries, int n) {
  const int thread = threadIdx.x;
  if (n <= kFewEntries) {  // each finds its place by counting those before it
    const Entry own = thread < n ? entries[thread] : 0;
    int place = 0;
    if (thread < n)
      for (int i = 0; i < n; ++i) place += entries[i] > own;
    __syncthreads();
    if (thread < n) entries[place] = own;
    __syncthreads();
    return;
  }
  int size = 2 * kFewEntries;
  while (size < n) size *= 2;
  for (int i = n + thread; i < size; i += kSelectThreads) entries[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int distance = run / 2; distance > 0; distance /= 2) {
      for (int pair = thread; pair < size / 2; pair += kSelectThreads) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const Entry a = entries[low], b = entries[high];
        const bool descending = (low & run) == 0;
        if ((a < b) == descending) {
          entries[low] = b;
          entries[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// Leaves the first min(k, n), the largest first, and gives their number.
__device__ inline int first_entries(Entry* entries, int n, int k, SelectMemory& memory) {
  if (n <= kFewEntries) {
    sort_entries(entries, n);
    return min(n, k);
  }
  if (n > k) n = keep_not_below(bound_of_first(entries, n, k, memory), entries, n, memory);
  sort_entries(entries, n);
  return n;
}

}  // namespace pykv
