// Entries (logit_order.h) in the shared memory of a block: the first k of them, and their order.
//
// All threads of the block call these together, with what they read in place behind a barrier; each ends with one.
#pragma once

#include <cstdint>

#include "sampling/logit_order.h"

namespace pykv {

constexpr int kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;

constexpr int kSelectBits = 10, kSelectBins = 1 << kSelectBits;  // of a step of bound_of_first
constexpr int kSelectFew = 128;                                  // so many are compared with each other

struct SelectMemory {
  uint32_t largest[kSelectWarps], least[kSelectWarps];
  Entry few[kSelectFew], found;
  uint32_t digit, with_digit, before;
  uint32_t parts[kSelectWarps];
  alignas(8) uint32_t bins[kSelectBins];
  uint32_t count;  // not beside the digit: loads of that take its neighbours along, while this may be set again already
  uint32_t num_few;
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

// Which bin, from the last one on, the `missing`-th of what was counted is in; how much lies in bins behind it, and in it.
struct CountedBin {
  uint32_t bin, before, in_it;
};
__device__ inline CountedBin bin_of(uint32_t missing, SelectMemory& memory) {
  // A thread's bins follow each other, the last ones first.
  constexpr int kOfThread = kSelectBins / kSelectThreads;
  const int first = kSelectBins - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  uint32_t counts[kOfThread], own = 0, total;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) own += counts[i] = memory.bins[first - i];
  uint32_t before = sum_before(own, memory, total);
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    if (before < missing && before + counts[i] >= missing) {
      memory.digit = static_cast<uint32_t>(first - i);
      memory.before = before;
      memory.with_digit = counts[i];
    }
    before += counts[i];
  }
  __syncthreads();
  return {memory.digit, memory.before, memory.with_digit};
}

// Nearly the largest t that `wanted` keys of all threads are not below: more by up to a quarter, or by keys that differ from it in
// the last 12 bits alone.
template <int kKeys>
__device__ uint32_t largest_bound(const uint32_t (&keys)[kKeys], uint32_t wanted, SelectMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  uint32_t own = keys[0];
#pragma unroll
  for (int i = 1; i < kKeys; ++i) own = max(own, keys[i]);
  // So many keys are not below the least of what is the largest in a warp, or a thread.
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, own);
  if (wanted <= kSelectWarps / 2) {  // so many warps have one that is not below the last of their largest ones
    if (lane == 0) memory.largest[thread / 32] = of_warp;
    __syncthreads();
    const uint32_t its = lane < kSelectWarps ? memory.largest[lane] : 0;
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < kSelectWarps; ++i) {
      const uint32_t other = __shfl_sync(0xffffffffu, its, i);
      before += other > its || (other == its && i < lane);
    }
    const uint32_t found = __ballot_sync(0xffffffffu, before == wanted - 1);
    return __shfl_sync(0xffffffffu, its, __ffs(static_cast<int>(found)) - 1);
  }
  const uint32_t least_of_warp = wanted <= kSelectWarps ? of_warp : __reduce_min_sync(0xffffffffu, own);
  if (lane == 0) {
    memory.largest[thread / 32] = of_warp;
    memory.least[thread / 32] = least_of_warp;
  }
  uint32_t t = 0, too_large = 0, before = 0;
  for (bool is_first = true;; is_first = false) {
    for (int i = thread; i < kSelectBins; i += kSelectThreads) memory.bins[i] = 0;
    __syncthreads();
    if (is_first) {
      too_large =
          __reduce_max_sync(0xffffffffu, memory.largest[lane % kSelectWarps]) + 1;  // no key is the last integer
      if (wanted <= kSelectThreads) t = __reduce_min_sync(0xffffffffu, memory.least[lane % kSelectWarps]);
    }
    const int shift = max(32 - kSelectBits - __clz(static_cast<int>(too_large - t - 1)), 0);
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      if (keys[i] >= t && keys[i] < too_large) atomicAdd(&memory.bins[(keys[i] - t) >> shift], 1u);
    __syncthreads();
    const CountedBin found = bin_of(wanted - before, memory);
    t += found.bin << shift;
    before += found.before;
    if (before + found.in_it <= wanted + wanted / 4 || shift <= 12) return t;
    too_large = min(too_large, t + (1u << shift));
    __syncthreads();  // what is in memory has been read
  }
}

// body(entry) for the entries of this thread.  Several are loaded before the first one is worked on.
template <int kAtOnce, class Body>
__device__ void each_entry(const Entry* entries, int n, Body body) {
#pragma unroll 1
  for (int first = threadIdx.x; first < n; first += kAtOnce * kSelectThreads) {
    Entry own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kSelectThreads;
      own[i] = at < n ? entries[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (own[i] != 0) body(own[i]);
  }
}

// The smallest of the first `wanted` of n different entries, or a number between it and the next one.  Each step divides the range
// of the keys in question into parts, counts how many are in each, and goes on with the part in which the bound lies.  Where all
// that are in question have the same key, the same is done with the rest of their bits.
__device__ inline Entry bound_of_first(const Entry* entries, int n, int wanted, SelectMemory& memory) {
  if (n <= wanted) return 0;
  const int thread = threadIdx.x, lane = thread % 32;
  constexpr int kAtOnce = 8;
  if (thread == 0) memory.num_few = 0;
  uint32_t missing = static_cast<uint32_t>(wanted), key = 0;
  uint32_t from = 0, to = ~0u;  // of the words in question
#pragma unroll 1
  while (true) {
    const auto word_of = [&](Entry entry) { return key == 0 ? key_of(entry) : static_cast<uint32_t>(entry); };
    const auto in_question = [&](Entry entry) {
      return word_of(entry) >= from && word_of(entry) <= to && (key == 0 || key_of(entry) == key);
    };
    uint32_t least = ~0u, largest = 0;
    each_entry<kAtOnce>(entries, n, [&](Entry entry) {
      if (!in_question(entry)) return;
      least = min(least, word_of(entry));
      largest = max(largest, word_of(entry));
    });
    least = __reduce_min_sync(0xffffffffu, least);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) {
      memory.least[thread / 32] = least;
      memory.largest[thread / 32] = largest;
    }
    for (int i = thread; i < kSelectBins; i += kSelectThreads) memory.bins[i] = 0;
    __syncthreads();
    from = __reduce_min_sync(0xffffffffu, memory.least[lane % kSelectWarps]);
    to = __reduce_max_sync(0xffffffffu, memory.largest[lane % kSelectWarps]);
    const int shift = max(32 - kSelectBits - __clz(static_cast<int>(to - from)), 0);
    each_entry<kAtOnce>(entries, n, [&](Entry entry) {
      if (in_question(entry)) atomicAdd(&memory.bins[(word_of(entry) - from) >> shift], 1u);
    });
    __syncthreads();
    const CountedBin found = bin_of(missing, memory);
    missing -= found.before;
    from += found.bin << shift;
    to = min(to, from + ((1u << shift) - 1u));
    if (missing == found.in_it) return key == 0 ? Entry{from} << 32 : Entry{key} << 32 | from;
    if (found.in_it <= kSelectFew) {  // how many of them come before each tells which it is
      each_entry<kAtOnce>(entries, n, [&](Entry entry) {
        if (in_question(entry)) memory.few[atomicAdd(&memory.num_few, 1u)] = entry;
      });
      __syncthreads();
      const int num_few = static_cast<int>(found.in_it);
      if (thread < num_few) {
        const Entry own = memory.few[thread];
        uint32_t before = 0;
#pragma unroll 4
        for (int i = 0; i < num_few; ++i) before += memory.few[i] > own;
        if (before == missing - 1) memory.found = own;
      }
      __syncthreads();
      return memory.found;
    }
    if (from == to) {
      key = from;
      from = 0;
      to = ~0u;
    }
  }
}

// Keeps entries above t, in any order, and gives their number.
__device__ inline int keep_above(Entry t, Entry* entries, int n, SelectMemory& memory) {
  if (threadIdx.x == 0) memory.count = 0;
  // What is kept goes to places before those that are read next.
  for (int first = 0; first < n; first += kSelectThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const Entry entry = i < n ? entries[i] : 0;
    __syncthreads();
    if (i < n && entry > t) entries[atomicAdd(&memory.count, 1u)] = entry;
  }
  __syncthreads();
  return static_cast<int>(memory.count);
}

constexpr int kFewEntries = 256;

// Sorts n different entries, the largest first.  Up to the power of two that is not below n, `entries` has room.
__device__ inline void sort_entries(Entry* entries, int n) {
  const int thread = threadIdx.x;
  if (n <= kFewEntries) {  // two threads find the place of each by counting those before it
    static_assert(2 * kFewEntries <= kSelectThreads);
    const Entry own = thread / 2 < n ? entries[thread / 2] : 0;
    int place = 0;
    if (thread / 32 * 16 < n)
      for (int i = thread % 2; i < n; i += 2) place += entries[i] > own;
    place += __shfl_xor_sync(0xffffffffu, place, 1);
    __syncthreads();
    if (thread / 2 < n && thread % 2 == 0) entries[place] = own;
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
  if (n > k) n = keep_above(bound_of_first(entries, n, k, memory) - 1, entries, n, memory);
  sort_entries(entries, n);
  return n;
}

}  // namespace pykv
