// The entries of a row that may be among its first k, in one pass.
//
// A block goes through its columns in groups, of which each thread has some vectors in registers, spread over the columns.  The
// first group is a sample: it tells a bound that somewhat more than k logits are probably not below.  What is not below it is
// appended to a list in shared memory.  A list that gets full is cut to its first k, the last of which is the new bound, and the
// group goes on.  Where all lists together have less than k, the pass begins anew with a bound that the first group alone has
// enough logits for.  So there is no input for which room does not suffice, or entries are missing.
//
// Of a group, the bound is the w-th largest of the maxima of half vectors: w logits are not below it.
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
  static int room(int k, int blocks) { return std::max(k <= 1024 ? 4096 : 8192, blocks * k); }
  static int most_blocks(int k) { return std::min(kPortableBlocks, 16384 / k); }

  // Brings the entries together in the list of the row's first block, and gives their number there, k to room, or less where `least`
  // leaves out others; all barriers are behind, and other blocks may end.
  //   k           1 ... the row's number of logits
  //   least       what is below it is no entry: where few tokens are allowed, lists would fill with the others
  //   value(x, column): what the logit of a column counts as
  template <class Value>
  static __device__ int find(const RowSlice<T>& slice, int k, float least, RowExchange& exchange, Entry* entries,
                             int room, SelectMemory& memory, Value value) {
    const int groups = max((slice.end - slice.first_vector + kGroup - 1) / kGroup, 1);
    const int enough = (k + exchange.blocks() - 1) / exchange.blocks(), of_group = (enough + groups - 1) / groups;
    // The number of the first k that a sample has is known within about its root.
    int wanted = min(of_group + static_cast<int>(4.0f * sqrtf(static_cast<float>(of_group))) + 4, enough);
#pragma unroll 1
    while (true) {
      int n = collect(slice, groups, wanted, k, least, exchange, entries, room, memory, value);
      RowExchange::ListPlace place = exchange.place_of_list(n);
      if (place.total < k && wanted < enough) {
        wanted = enough;
        __syncthreads();  // all have read the count
        continue;
      }
      if (place.total > room) {
        if (n > k) {
          cut(k, entries, n, memory);
          n = k;
        }
        place = exchange.place_of_list(n);
      }
      exchange.append_to_first(entries, n, place);
      return place.total;
    }
  }

 private:
  // Gives the number of entries in this block's list.
  template <class Value>
  static __device__ int collect(const RowSlice<T>& slice, int groups, int wanted, int k, float least,
                                RowExchange& exchange, Entry* entries, int room, SelectMemory& memory, Value value) {
    const int thread = threadIdx.x;
    float bound = 0.0f;
    // Vectors of a group lie as far from each other as there are groups.
    constexpr int kStep = kSelectThreads * kSize;
    const int distance = groups * kStep;
    if (thread == 0) memory.count = 0;
    // Warps do not wait for each other.  If the list has got full all the same, once more, with a bound by what it has and a wait in
    // each group.
#pragma unroll 1
    for (bool waits = false;; waits = true) {
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        const int first = slice.first_vector + group * kStep + thread * kSize;
        const auto column = [&](int v, int i) { return first + v * distance + i; };
        Pack<T> raw[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) raw[v] = slice.load(column(v, 0));
        if (group == 0 && !waits) {
          bound =
              first_bound(raw, wanted, exchange, memory, [&](float x, int v, int i) { return value(x, column(v, i)); });
          if (!(bound > least)) bound = least;
        }
        uint32_t pending = 0;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const Vec<float, kSize> x = to_floats(raw[v]);
#pragma unroll
          for (int i = 0; i < kSize; ++i)
            if (!(value(x[i], column(v, i)) < bound)) pending |= 1u << (v * kSize + i);
        }
        if (first < slice.begin || column(kVectors - 1, kSize) > slice.end)  // what lies outside the row is no entry
#pragma unroll 1
          for (int v = 0; v < kVectors; ++v) {
            const int from = min(max(slice.begin - column(v, 0), 0), kSize),
                      to = min(max(slice.end - column(v, 0), 0), kSize);
            const uint32_t inside = ((1u << to) - 1u) & ~((1u << from) - 1u);
            pending &= ~(((1u << kSize) - 1u) << (v * kSize)) | inside << (v * kSize);
          }
        while (true) {
          uint32_t place = pending == 0 ? 0 : atomicAdd(&memory.count, static_cast<uint32_t>(__popc(pending)));
#pragma unroll 1
          for (; pending != 0 && place < static_cast<uint32_t>(room); pending &= pending - 1, ++place) {
            const int bit = __ffs(static_cast<int>(pending)) - 1;
            const int at = column(bit / kSize, bit % kSize);
            entries[place] = entry_of(key_of_logit(value(to_float(slice.row[at]), at)), static_cast<uint32_t>(at));
          }
          if (!waits || !__syncthreads_or(pending != 0)) break;
          bound = cut(k, entries, room, memory);
        }
      }
      __syncthreads();
      const uint32_t count = memory.count;
      if (waits || count <= static_cast<uint32_t>(room))
        return static_cast<int>(min(count, static_cast<uint32_t>(room)));
      bound = cut(k, entries, room, memory);
      __syncthreads();  // all have read the count
      if (thread == 0) memory.count = 0;
      __syncthreads();
    }
  }

  // Cuts a full list to its first k, and gives the logit of the last of them.  Rare, and so not inlined.
  static __device__ __noinline__ float cut(int k, Entry* entries, int n, SelectMemory& memory) {
    const Entry t = bound_of_first(entries, n, k, memory);
    keep_not_below(t, entries, n, memory);
    return logit_of_key(key_of(t));
  }

  template <class Value>
  static __device__ float first_bound(const Pack<T> (&raw)[kVectors], int wanted, RowExchange& exchange,
                                      SelectMemory& memory, Value value) {
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
    // Rough is enough.
    uint32_t t = largest_bound(largest, static_cast<uint32_t>(wanted), memory);
    if (exchange.blocks() > 1)
      t = __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(exchange.number_of_lane(t, ~0u)));
    return logit_of_key(t);
  }
};

}  // namespace pykv
