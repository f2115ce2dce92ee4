// The entries of a row that may be among its first k, in one pass.
//
// A block goes through its columns in groups, of which each thread has some vectors in registers, spread over the columns.  The
// first group is a sample: it tells a bound that somewhat more than k logits are probably not below.  What is not below it is
// appended to a list in shared memory.  Where all lists together have less than k, the pass begins anew with a bound that the first
// group alone has enough logits for.  A list gets full where many logits are equal, -infinity above all: then it is made anew of
// what is above the bound, and of those that equal it, the first ones are appended in the order of their columns.  If even that is
// too much, the list is cut to its first k, the last of which is the new bound.  So there is no input for which room does not
// suffice, or entries are missing.
//
// Of a group, the bound is the w-th largest of the maxima of half vectors: w logits are not below it.
#pragma once

#include "sampling/row_blocks.cuh"

namespace pykv {

// kVectors: of a thread in a group; at most 1024 entries are found with 1, and 4096 with 4.  kAhead: the vectors of the next group
// are loaded while those of one are worked on, which wants registers.
template <class T, int kVectors = 4, bool kAhead = false>
struct TopKCandidates {
  static constexpr int kSize = kPackSize<T>;
  static constexpr int kMaxima = 2 * kVectors, kNeighbours = kSize / 2;  // maxima of a thread, each of so many logits
  static constexpr int kStep = kSelectThreads * kSize, kGroup = kVectors * kStep;

  // Entries in shared memory.
  static int room(int k) { return k <= 1024 ? 4096 : 8192; }

  // Brings the entries together in the list of the row's first block, and gives their number there, k to room, or less where `least`
  // leaves out others; all barriers are behind, and other blocks may end.
  //   k           1 ... the row's number of logits
  //   least       what is below it is no entry: where few tokens are allowed, lists would fill with the others
  //   value(x, column): what the logit of a column counts as
  template <class Value>
  static __device__ int find(const RowSlice<T>& slice, int k, float least, RowExchange& exchange, Entry* entries,
                             int room, SelectMemory& memory, Value value) {
    const int groups = (slice.width + kGroup - 1) / kGroup;  // the same in all blocks
    const int enough = (k + exchange.blocks() - 1) / exchange.blocks(), of_group = (enough + groups - 1) / groups;
    // The number of the first k that a sample has is known within about its root.
    int wanted = min(of_group + static_cast<int>(4.0f * sqrtf(static_cast<float>(of_group))) + 4, enough);
    int n;
    uint32_t tied;  // 0, or a key that at least k logits of the row are not below, and too many for a list
    RowExchange::ListPlace place;
#pragma unroll 1
    while (true) {
      float bound;
      n = collect(slice, groups, wanted, least, exchange, entries, room, memory, value, bound);
      tied = n <= room ? 0 : key_of_logit(bound);
      place = exchange.place_of_list(n, tied);
      if (tied != 0 || place.total >= k || wanted >= enough) break;
      wanted = enough;
      __syncthreads();  // all have read the count
    }
    const auto keep_what_is_above = [&](uint32_t key) {
      __syncthreads();  // all have read the count
      n = keep_above(Entry{key} << 32 | 0xffffffffu, entries, n, memory);
      place = exchange.place_of_list(n);
    };
    if (tied != 0) {
      __syncthreads();  // the same
      if (n > room) n = collect_above(slice, groups, k, entries, room, memory, value, tied);
      exchange.place_of_list(n, tied);
      keep_what_is_above(tied);
    }
    if (place.total > room) {                      // only where blocks share a row: find a bound for which it is not
      uint64_t low = 0, high = uint64_t{1} << 32;  // at least k entries are not below `low`, and fewer not below `high`
      int total = 0;
#pragma unroll 1
      while (high - low > 1 && (total < k || total > room)) {
        const uint64_t middle = (low + high) / 2;
        uint32_t own = 0, of_block;
        for (int i = threadIdx.x; i < n; i += kSelectThreads) own += key_of(entries[i]) >= middle;
        sum_before(own, memory, of_block);
        total = exchange.place_of_list(static_cast<int>(of_block)).total;
        (total < k ? high : low) = middle;
      }
      tied = static_cast<uint32_t>(high - low > 1 ? low - 1 : low);
      keep_what_is_above(tied);
    }
    if (place.total < k && tied != 0) {
      n = append_tied(slice, tied, k - place.total, exchange, entries, n, memory, value);
      place = exchange.place_of_list(n);
    }
    exchange.append_to_first(entries, n, place);
    return place.total;
  }

 private:
  // Lists what is not below a bound, and gives how many that is; more than room: the list is of no use.
  template <class Value>
  static __device__ int collect(const RowSlice<T>& slice, int groups, int wanted, float least, RowExchange& exchange,
                                Entry* entries, int room, SelectMemory& memory, Value value, float& bound) {
    const int thread = threadIdx.x;
    if (thread == 0) memory.count = 0;
    Pack<T> next[kVectors];
    load(slice, groups, 0, next);
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      Pack<T> raw[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) raw[v] = next[v];
      if (kAhead && group + 1 < groups) load(slice, groups, group + 1, next);
      const Columns columns(slice, groups, group);
      if (group == 0) {
        bound = first_bound(raw, wanted, exchange, memory,
                            [&](float x, int v, int i) { return value(x, columns.at(v, i)); });
        if (!(bound > least)) bound = least;
        if (!(bound > -INFINITY)) {  // there would be too many
          bound = -INFINITY;
          return room + 1;
        }
      }
      uint32_t pending = which(slice, columns, raw, [&](float x, int column) { return !(value(x, column) < bound); });
      if (append(slice, columns, pending, entries, room, memory, value)) break;  // all is in vain
      if (!kAhead && group + 1 < groups) load(slice, groups, group + 1, next);
    }
    __syncthreads();
    return static_cast<int>(min(memory.count, static_cast<uint32_t>(room) + 1));
  }

  // Lists what is above the key `tied`, and maybe more; gives how many that is.  If the list gets full, it is cut to its first k,
  // and what is left out is not above `tied` any more.
  template <class Value>
  static __device__ int collect_above(const RowSlice<T>& slice, int groups, int k, Entry* entries, int room,
                                      SelectMemory& memory, Value value, uint32_t& tied) {
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      Pack<T> raw[kVectors];
      load(slice, groups, group, raw);
      const Columns columns(slice, groups, group);
      uint32_t pending =
          which(slice, columns, raw, [&](float x, int column) { return key_of_logit(value(x, column)) > tied; });
#pragma unroll 1
      while (true) {
        append(slice, columns, pending, entries, room, memory, value);
        if (!__syncthreads_or(pending != 0)) break;
        tied = key_of(cut(k, entries, room, memory));
      }
    }
    return static_cast<int>(memory.count);
  }

  // Appends those of the row's first `missing` logits with the key `tied` that this block has.  Gives the list's length.
  template <class Value>
  static __device__ int append_tied(const RowSlice<T>& slice, uint32_t tied, int missing, RowExchange& exchange,
                                    Entry* entries, int n, SelectMemory& memory, Value value) {
    const int thread = threadIdx.x;
    int found = 0, wanted = missing;  // of this block
    // How many there are, unless more than are missing; then those, in the order of their columns.
#pragma unroll 1
    for (bool counts = true;; counts = false) {
#pragma unroll 1
      for (int begin = slice.first_vector; begin < slice.end && found < wanted; begin += kStep) {
        const int first = begin + thread * kSize;
        const Vec<float, kSize> x = to_floats(slice.load(first));
        uint32_t bits = inside(slice, first), total;
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          if (key_of_logit(value(x[i], first + i)) != tied) bits &= ~(1u << i);
        int at = found + static_cast<int>(sum_before(static_cast<uint32_t>(__popc(bits)), memory, total));
        for (; !counts && bits != 0 && at < wanted; bits &= bits - 1, ++at)
          entries[n + at] = entry_of(tied, static_cast<uint32_t>(first + __ffs(static_cast<int>(bits)) - 1));
        found += static_cast<int>(total);
        __syncthreads();
      }
      if (!counts) return n + wanted;
      const int own = min(found, missing);
      wanted = max(min(missing - exchange.place_of_list(own).before, own), 0);
      found = 0;
    }
  }

  // Which columns the vectors of a thread have in a group: as far from each other as there are groups.
  struct Columns {
    int first, distance;

    __device__ Columns(const RowSlice<T>& slice, int groups, int group)
        : first(slice.first_vector + group * kStep + static_cast<int>(threadIdx.x) * kSize), distance(groups * kStep) {}
    __device__ int at(int v, int i) const { return first + v * distance + i; }
    // What lies outside the row is no entry.
    __device__ void leave_out_others(const RowSlice<T>& slice, uint32_t& pending) const {
      if (first >= slice.begin && at(kVectors - 1, kSize) <= slice.end) return;
#pragma unroll 1
      for (int v = 0; v < kVectors; ++v)
        pending &= ~(((1u << kSize) - 1u) << (v * kSize)) | inside(slice, at(v, 0)) << (v * kSize);
    }
  };
  static __device__ void load(const RowSlice<T>& slice, int groups, int group, Pack<T> (&raw)[kVectors]) {
    const Columns columns(slice, groups, group);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = slice.load(columns.at(v, 0));
  }

  // Which logits of a thread's vectors in a group are wanted, a bit each; is_wanted(logit, column).
  template <class IsWanted>
  static __device__ uint32_t which(const RowSlice<T>& slice, const Columns& columns, const Pack<T> (&raw)[kVectors],
                                   IsWanted is_wanted) {
    uint32_t bits = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Vec<float, kSize> x = to_floats(raw[v]);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        if (is_wanted(x[i], columns.at(v, i))) bits |= 1u << (v * kSize + i);
    }
    columns.leave_out_others(slice, bits);
    return bits;
  }

  // Which elements of the vector that begins with a column are in this block's part of the row, a bit each.
  static __device__ uint32_t inside(const RowSlice<T>& slice, int column) {
    const int from = min(max(slice.begin - column, 0), kSize), to = min(max(slice.end - column, 0), kSize);
    return ((1u << to) - 1u) & ~((1u << from) - 1u);
  }

  // Appends those logits of a thread's vectors whose bits are set; clears the bits of those that there is room for.  Gives whether
  // there was none for one of the warp.
  template <class Value>
  static __device__ bool append(const RowSlice<T>& slice, const Columns& columns, uint32_t& pending, Entry* entries,
                                int room, SelectMemory& memory, Value value) {
    const uint32_t own = static_cast<uint32_t>(__popc(pending));
    uint32_t place = own == 0 ? 0 : atomicAdd(&memory.count, own);
    const bool is_full = place + own > static_cast<uint32_t>(room);
#pragma unroll 1
    for (; pending != 0 && place < static_cast<uint32_t>(room); pending &= pending - 1, ++place) {
      const int bit = __ffs(static_cast<int>(pending)) - 1;
      const int at = columns.at(bit / kSize, bit % kSize);
      entries[place] = entry_of(key_of_logit(value(to_float(slice.row[at]), at)), static_cast<uint32_t>(at));
    }
    return __any_sync(0xffffffffu, is_full);
  }

  // Cuts a full list to its first k, and gives the last of them, or a number between it and the next one.  Rare, and so not inlined.
  static __device__ __noinline__ Entry cut(int k, Entry* entries, int n, SelectMemory& memory) {
    const Entry t = bound_of_first(entries, n, k, memory);
    keep_above(t - 1, entries, n, memory);
    return t;
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
