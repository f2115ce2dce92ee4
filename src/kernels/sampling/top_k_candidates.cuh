// The entries of a row that may be among its first k, in one pass.
//
// A block goes through its columns in groups, of which each thread has some vectors in registers.  Of the first group, the k-th
// largest of the maxima of half vectors is a bound: k logits are not below it.  What is not below the bound is appended to a list in
// shared memory; a full list is cut to its first k, the last of which is the new bound, and the group goes on: there is no
// input for which room does not suffice.  Blocks of a cluster share their first bounds, each that of k / blocks logits.
#pragma once

#include "sampling/row_blocks.cuh"

namespace pykv {

// kVectors: of a thread in a group; at most 1024 entries are found with 1, and 4096 with 4.
template <class T, int kVectors = 4>
struct TopKCandidates {
  static constexpr int kSize = kPackSize<T>;
  static constexpr int kMaxima = 2 * kVectors, kNeighbours = kSize / 2;  // maxima of a thread, each of so many logits
  static constexpr int kGroup = kVectors * kSelectThreads * kSize;

  // Entries in shared memory, where `blocks` share a row.
  static int room(int k, int blocks) {
    const int own = k <= 1024 ? 4096 : 12288;
    return std::max(own, blocks * k);
  }
  static int most_blocks(int k) { return 16384 / k; }

  // Gives the number of entries in this block's list, 0 to room; all barriers are behind.
  //   k           1 ... the row's number of logits, and below the list's room
  //   bound_key   in shared memory, for the other blocks
  //   value(x, column): what the logit of a column counts as
  template <class Value>
  static __device__ int find(const RowSlice<T>& slice, int k, int blocks, Entry* entries, int room, uint32_t& bound_key,
                             SelectMemory& memory, Value value) {
    const int thread = threadIdx.x;
    float bound = 0.0f;
    if (thread == 0) memory.count = 0;
    bool is_first = true;
    // The first round comes even to a block without columns: others wait for its bound.
    for (int group = slice.first_vector; is_first || group < slice.end; group += kGroup) {
      Pack<T> raw[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) raw[v] = slice.load(group + (v * kSelectThreads + thread) * kSize);
      const auto column = [&](int v, int i) { return group + (v * kSelectThreads + thread) * kSize + i; };
      if (is_first) {
        bound = first_bound(raw, k, blocks, bound_key, memory.counter,
                            [&](float x, int v, int i) { return value(x, column(v, i)); });
        is_first = false;
      }
      uint32_t pending = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Vec<float, kSize> x = to_floats(raw[v]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int at = column(v, i);
          if (!(value(x[i], at) < bound) && at >= slice.begin && at < slice.end) pending |= 1u << (v * kSize + i);
        }
      }
      while (true) {
        uint32_t place = pending == 0 ? 0 : atomicAdd(&memory.count, static_cast<uint32_t>(__popc(pending)));
        for (; pending != 0 && place < static_cast<uint32_t>(room); pending &= pending - 1, ++place) {
          const int bit = __ffs(static_cast<int>(pending)) - 1;
          const int at = column(bit / kSize, bit % kSize);
          entries[place] = entry_of(key_of_logit(value(to_float(slice.row[at]), at)), static_cast<uint32_t>(at));
        }
        if (!__syncthreads_or(pending != 0)) break;
        bound = cut(k, entries, room, memory);
      }
    }
    return static_cast<int>(min(memory.count, static_cast<uint32_t>(room)));
  }

  // Cuts a full list to its first k, and gives the logit of the last of them.
  static __device__ float cut(int k, Entry* entries, int n, SelectMemory& memory) {
    const Entry t = bound_of_first(entries, n, k, memory);
    keep_not_below(t, entries, n, memory);
    return logit_of_key(key_of(t));
  }

 private:
  template <class Value>
  static __device__ float first_bound(const Pack<T> (&raw)[kVectors], int k, int blocks, uint32_t& bound_key,
                                      BlockCounter& counter, Value value) {
    uint32_t largest[kMaxima];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Vec<float, kSize> x = to_floats(raw[v]);
#pragma unroll
      for (int first = 0; first < kSize; first += kNeighbours) {
        float m = value(x[first], v, first);
#pragma unroll
        for (int i = first + 1; i < first + kNeighbours; ++i) m = fmaxf(m, value(x[i], v, i));  // NaN is passed over
        largest[(v * kSize + first) / kNeighbours] = m == m ? key_of_logit(m) : 0;
      }
    }
    // Rough is enough: up to a quarter more than are wanted, and not the last bits.
    const uint32_t wanted = static_cast<uint32_t>((k + blocks - 1) / blocks);
    uint32_t t = largest_bound(0u, 31, 12, wanted, wanted + wanted / 4, counter, [&](uint32_t candidate) {
      uint32_t count = 0;
#pragma unroll
      for (int i = 0; i < kMaxima; ++i) count += largest[i] >= candidate;
      return count;
    });
    if (blocks > 1) {
      if (threadIdx.x == 0) bound_key = t;
      cluster_barrier();
      for (int rank = 0; rank < blocks; ++rank) t = min(t, load_from_block(&bound_key, rank));
    }
    return logit_of_key(t);
  }
};

// Brings the lists of all blocks together in that of the first one, where each has at most k entries; gives how many there are
// then.  Blocks but the first may end after it.
inline __device__ int gather_lists(Entry* entries, int n, int rank, int blocks, uint32_t& list_size) {
  if (threadIdx.x == 0) list_size = static_cast<uint32_t>(n);
  cluster_barrier();
  if (rank == 0) {
    for (int other = 1; other < blocks; ++other) {
      const int size = static_cast<int>(load_from_block(&list_size, other));
      for (int i = threadIdx.x; i < size; i += kSelectThreads) entries[n + i] = load_from_block(entries + i, other);
      n += size;
    }
  }
  cluster_barrier();
  return n;
}

}  // namespace pykv
