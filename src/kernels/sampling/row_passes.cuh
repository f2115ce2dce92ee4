// Passes over a row that a cluster of blocks shares, and the search for the entry at which a sum of weights reaches a target.
#pragma once

#include "cuda/approximate.cuh"
#include "sampling/arithmetic.h"
#include "sampling/row_team.cuh"

namespace pykv {

// body(column of the first, the vector's logits), for the vectors of this thread; all threads of a warp come together.
template <int kVectors, class T, class Body>
__device__ void each_vector(const RowSlice<T>& slice, Body body) {
  constexpr int kSize = kPackSize<T>;
  const int step = kSelectThreads * kSize;
  for (int group = slice.first_vector; group < slice.end; group += kVectors * step) {
    Pack<T> raw[kVectors];
    const int first = group + static_cast<int>(threadIdx.x) * kSize;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = slice.load(first + v * step);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) body(first + v * step, to_floats(raw[v]));
  }
}

// body(column of the first, the vector), for the vectors of this thread, each asked for while the one before is worked on.
template <class T, class Body>
__device__ void each_vector_ahead(const RowSlice<T>& slice, Body body) {
  constexpr int kSize = kPackSize<T>;
  const int step = kSelectThreads * kSize;
  Pack<T> next{};
#pragma unroll 1
  for (int group = slice.first_vector - step; group < slice.end; group += step) {
    const int at = group + static_cast<int>(threadIdx.x) * kSize;
    const Pack<T> raw = next;
    slice.bring_ahead(group + step, step, group < slice.first_vector);
    next = slice.load(at + step);
    if (group >= slice.first_vector) body(at, raw);
  }
}

__device__ inline float larger_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
template <int kSize>
__device__ float largest_of(const Vec<float, kSize>& x) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kSize; ++i) largest = larger_or_nan(largest, x[i]);
  return largest;
}

// Of the two halves of words, each.
template <class T>
__device__ uint32_t larger_halves(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (std::is_same_v<T, half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}
template <class T>
__device__ float largest_of(const Pack<T>& x) {
  if constexpr (sizeof(T) == 2) {
    const float2 pair = word_to_floats<T>(
        larger_halves<T>(larger_halves<T>(x.words[0], x.words[1]), larger_halves<T>(x.words[2], x.words[3])));
    return larger_or_nan(pair.x, pair.y);
  } else {
    return largest_of(to_floats(x));
  }
}

// Whether entries of a row without NaN come before another one, or are it.
struct EntryBound {
  float logit;
  uint32_t index;

  __device__ explicit EntryBound(Entry entry)
      : logit(entry == 0 ? -INFINITY : logit_of_key(key_of(entry))), index(entry == 0 ? ~0u : index_of(entry)) {}
  __device__ bool includes(float x, int column) const {
    return (x > logit) | ((x == logit) & (static_cast<uint32_t>(column) <= index));  // no branches
  }
};

// The float before x; that before 0 is no zero.
__device__ inline float next_below(float x) {
  const uint32_t key = key_of_logit(x);
  return logit_of_key(key == key_of_logit(0.0f) ? key - 2 : key - 1);
}

// The sum of masses of entries from `floor` on; share(logit) is 0 for -infinity.
template <int kVectors, class T, class Share>
__device__ Mass sum_of_shares(const RowSlice<T>& slice, Entry floor, Share share) {
  constexpr int kSize = kPackSize<T>;
  const EntryBound bound(floor);
  Mass sum = 0;
  each_vector<kVectors>(slice, [&](int first, Vec<float, kSize> x) {
    if (floor != 0)
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        if (!bound.includes(x[i], first + i)) x[i] = -INFINITY;
    MassSum own;
#pragma unroll
    for (int i = 0; i < kSize; ++i) own.add(share(x[i]));
    sum += own.of(kSize);
  });
  return sum;
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
  float largest, scale, top_p;

  __device__ uint64_t target(uint64_t total) const { return are_counts ? k : share_of(total, top_p); }
  __device__ float share(float x) const { return share_of_largest(x, largest, scale); }
  // How far a logit lies below the largest one, in bins; its share is 2^(-distance / kBinsOfOctave).
  __device__ float distance(float x) const { return below(x, largest) * (-kBinsOfOctave * scale); }
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

// How far from the largest, in bins, entries surely come before the target is reached, and how far they may.
struct TargetBounds {
  float surely, at_most;
};

// The mass of a bin is known nearly: 2^(-r / kBinsOfOctave) is taken for linear in -1/2 <= r <= 1/2, which is 6e-5 too little at
// most, and rounded to a unit, for which there are 7 to 20 bits.
struct BinUnit {
  int bits;
  float unit, slope;

  __device__ BinUnit(int num_cols, bool are_counts) {
    bits = min(__clz(num_cols) - 1, 20);
    unit = are_counts ? 1.0f : static_cast<float>(1 << bits);
    slope = are_counts ? 0.0f : -0.693147181f / kBinsOfOctave * unit;
  }
  // Adds to the bin next to a place.
  __device__ void add(RowMemory& memory, float place) const {
    const float nearest = place + kRound, rest = place - (nearest - kRound);
    atomicAdd(&memory.bins_low[(bits_of(nearest) - kBitsOfRound) & (kBins - 1)],
              bits_of(fmaf(rest, slope, unit + kRound)) - kBitsOfRound);
  }
};

// The bounds by what lies in bins.  The largest logit's place is from 0 to 4 bins after `origin`; `place` is that.
template <class Weights>
__device__ TargetBounds bounds_by_bins(RowTeam& team, RowMemory& memory, int num_cols, const Weights& weights,
                                       int origin, float place) {
  const BinUnit unit(num_cols, weights.are_counts);
  const OwnBins own_bins = add_bins_of_blocks<false>(team, memory, origin);
  const float first = static_cast<float>(origin) - place;  // how far the first bin is from the largest
  uint64_t sums[4] = {}, own = 0, total;
  if (own_bins.in_this_thread())
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = memory.bins_low[own_bins.place + i];
      const float distance = first + static_cast<float>(own_bins.first + i);
      const float of_bin = power_of_2(distance * (-1.0f / kBinsOfOctave)) * (0x1p40f / unit.unit);
      if (!weights.are_counts) sums[i] = static_cast<Mass>(static_cast<float>(sums[i]) * of_bin);
      own += sums[i];
    }
  constexpr int kNone = -2;
  if (threadIdx.x == 0) memory.bin = memory.last_sure_bin = kNone;
  uint64_t sum = team.sum_before(own, total);
  // What lies in no bin has a mass of up to 2^-30 each.
  const uint64_t target = weights.target(total),
                 error = weights.are_counts
                             ? 0
                             : (total >> min(unit.bits - 1, 11)) + (uint64_t(num_cols) << (kMassBits - 30));
  // What surely comes before does not reach the target: the entry that does is near.
  const uint64_t surely = target > error ? target - error - 1 : 0, at_most = target + error;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t before = sum;
    sum += sums[i];
    if (before <= surely && sum > surely) memory.last_sure_bin = own_bins.first + i - 1;
    if (before < at_most && sum >= at_most) memory.bin = own_bins.first + i;
  }
  __syncthreads();
  int last_sure = memory.last_sure_bin, last = memory.bin;
  if (team.blocks() > 1) {
    const uint64_t found = team.exchange().number_of_lane(
        static_cast<uint64_t>(last_sure - kNone) << 32 | static_cast<uint32_t>(last - kNone), 0);
    last_sure = __reduce_max_sync(0xffffffffu, static_cast<int>(found >> 32)) + kNone;
    last = __reduce_max_sync(0xffffffffu, static_cast<int>(found & 0xffffffffu)) + kNone;
  } else {
    __syncthreads();  // all have read them
  }
  if (last_sure == kNone) last_sure = kBins - 2;
  if (last == kNone) last = kBins - 1;
  constexpr float kHalf = 0.5f, kMargin = 0.01f;
  return {first + static_cast<float>(last_sure) + (kHalf - kMargin),
          last == kBins - 1 ? INFINITY : first + static_cast<float>(last) + (kHalf + kMargin)};
}

// One pass, in which each entry is added to the bin of its distance from the largest one.
template <class T, class Weights, class Value>
__device__ TargetBounds bounds_of_target(RowTeam& team, RowMemory& memory, const RowSlice<T>& slice, int num_cols,
                                         Entry floor, const Weights& weights, Value value) {
  constexpr float kLast = kBins - 1;  // what is further away has no mass
  const BinUnit unit(num_cols, weights.are_counts);
  const EntryBound from(floor);
  clear_bins(memory);
  each_vector<2>(slice, [&](int first, const Vec<float, kPackSize<T>>& raw) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      const float x = value(raw[i], first + i), distance = fminf(weights.distance(x), kLast);
      if ((distance < kLast) & ((floor == 0) | from.includes(x, first + i))) unit.add(memory, distance);
    }
  });
  return bounds_by_bins(team, memory, num_cols, weights, 0, 0.0f);
}

// The largest logit, and bounds for a share of the masses of all, in one pass.  Before the largest is known, a logit's place is
// its distance from 0, and bins are used again and again: for what is nearer than kWithin to the first logits of its warp.
// Nothing is bounded where some of that may lie further from the largest than there are bins, or places are not exact enough.
struct BoundedLargest {
  float largest;
  bool is_bounded;
  TargetBounds bounds;
};
template <class T, class Value>
__device__ BoundedLargest bounds_with_largest(RowTeam& team, RowMemory& memory, const RowSlice<T>& slice, int num_cols,
                                              float scale, float top_p, Value value) {
  constexpr int kSize = kPackSize<T>;
  constexpr float kWithin = 30 * kBinsOfOctave, kMostPlace = 1 << 13;
  const float bins_of_logit = -kBinsOfOctave * scale;
  const BinUnit unit(num_cols, false);
  clear_bins(memory);
  float own_largest = -INFINITY, first_place = INFINITY;
  each_vector<2>(slice, [&](int first, const Vec<float, kSize>& raw) {
    Vec<float, kSize> x;
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = value(raw[i], first + i);
    const float largest = largest_of(x);
    own_largest = larger_or_nan(own_largest, largest);
    if (!(first_place < INFINITY))
      first_place = logit_of_key(__reduce_max_sync(0xffffffffu, key_of_logit(largest))) * bins_of_logit;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float place = x[i] * bins_of_logit;
      if (place - first_place <= kWithin) unit.add(memory, place);
    }
  });
  // The largest, and the last of the first places.
  const uint32_t last_place = first_place < INFINITY ? key_of_logit(first_place) : 0;
  const uint64_t keys = team.reduce(uint64_t{key_of_logit(own_largest)} << 32 | last_place, [](uint64_t a, uint64_t b) {
    return uint64_t{max(static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b >> 32))} << 32 |
           max(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
  });
  BoundedLargest found{logit_of_key(static_cast<uint32_t>(keys >> 32)), false, {-1.0f, INFINITY}};
  const float place = found.largest * bins_of_logit;
  found.is_bounded = fabsf(place) < kMostPlace &&
                     logit_of_key(static_cast<uint32_t>(keys)) + kWithin - place < static_cast<float>(kBins - 8);
  if (!found.is_bounded) return found;
  const int origin = static_cast<int>(bits_of(place + kRound) - kBitsOfRound) & ~3;
  const LogitWeights weights{false, 0, found.largest, scale, top_p};
  found.bounds = bounds_by_bins(team, memory, num_cols, weights, origin, place);
  return found;
}

// The largest entry, not below `floor`, for which the weights of all entries from it on reach their target; `floor` where all
// together do not exceed it.  Entries infinitely far from the largest do not count.  `entries` is memory for a list.
template <class T, class Weights, class Value>
__device__ Entry reach_target(RowTeam& team, RowMemory& memory, const RowSlice<T>& slice, int num_cols, Entry floor,
                              const Weights& weights, Entry* entries, int room, Value value) {
  constexpr int kSize = kPackSize<T>;
  const EntryBound from(floor);
  const TargetBounds bounds = bounds_of_target(team, memory, slice, num_cols, floor, weights, value);
  const auto entry_at = [](float x, int column) { return entry_of(key_of_logit(x), static_cast<uint32_t>(column)); };
  const auto is_near = [&](float distance) { return distance > bounds.surely && distance < bounds.at_most; };
  const auto weight_of = [&](float x) { return weights.are_counts ? uint64_t{1} : mass_of_share(weights.share(x)); };
  // What surely comes before the target is added up; of others that may, there is a list.
  if (threadIdx.x == 0) memory.select.count = 0;
  __syncthreads();
  uint64_t all = 0, before = 0;
  each_vector<1>(slice, [&](int first, const Vec<float, kSize>& raw) {
    MassSum all_masses, masses_before;
    uint32_t num_all = 0, num_before = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float x = value(raw[i], first + i);
      if (floor != 0 && !from.includes(x, first + i)) x = -INFINITY;
      const float distance = weights.distance(x);
      MassSum own;
      own.add(weights.share(x));
      all_masses += own;
      num_all += distance < INFINITY;
      if (distance <= bounds.surely) {
        masses_before += own;
        ++num_before;
      } else if (distance < bounds.at_most) {
        const uint32_t place = atomicAdd(&memory.select.count, 1u);
        if (place < static_cast<uint32_t>(room)) entries[place] = entry_at(x, first + i);
      }
    }
    all += weights.are_counts ? num_all : all_masses.of(kSize);
    before += weights.are_counts ? num_before : masses_before.of(num_before);
  });
  all = team.reduce(all, Plus());
  const uint64_t target = weights.target(all);
  if (all <= target) return floor;
  uint64_t missing = target - team.reduce(before, Plus());

  // Which entry it is, its bits tell, kDigit of them at a time: in the list, if it had room; else in more passes over the row.
  const int count = static_cast<int>(memory.select.count);
  const RowExchange::ListPlace place = team.exchange().place_of_list(count);
  const bool is_listed = place.total <= room;
  if (is_listed) team.exchange().append_to_first(entries, count, place);
  Entry found = 0;
  if (!is_listed || team.rank() == 0) {
    team.exchange().set_alone(is_listed);
    const auto each_near = [&](auto body) {  // body(entry, logit)
      if (is_listed) {
        for (int i = threadIdx.x; i < place.total; i += kSelectThreads)
          body(entries[i], logit_of_key(key_of(entries[i])));
      } else {
        each_logit(slice, value, [&](float x, int column) {
          if (is_near(weights.distance(x)) && (floor == 0 || from.includes(x, column))) body(entry_at(x, column), x);
        });
      }
    };
    const auto either = [](uint64_t a, uint64_t b) { return a | b; };
    Entry ones = 0, zeros = 0;
    each_near([&](Entry entry, float) {
      ones |= entry;
      zeros |= ~entry;
    });
    ones = team.reduce(ones, either);
    zeros = team.reduce(zeros, either);
    constexpr int kDigit = 11;
    static_assert(1 << kDigit == kBins);
    found = ones & ~zeros;
    const Entry in_question = ones & zeros;
    int bit = in_question == 0 ? -1 : 63 - __clzll(static_cast<long long>(in_question));
    if (bit >= 0) found = found >> bit >> 1 << bit << 1;
#pragma unroll 1
    while (bit >= 0) {
      const int last = max(bit - kDigit + 1, 0);
      const uint32_t mask = (2u << (bit - last)) - 1u;
      clear_bins(memory);
      each_near([&](Entry entry, float x) {
        if ((entry ^ found) >> bit >> 1 == 0)
          add_to_bin(memory, static_cast<int>(~static_cast<uint32_t>(entry >> last) & mask), weight_of(x));
      });
      const FoundBin reached = find_bin(team, memory, missing);
      missing -= reached.before;
      found |= Entry{~static_cast<uint32_t>(reached.bin) & mask} << last;
      bit = last - 1;
    }
    team.exchange().set_alone(false);
  }
  __syncthreads();
  return team.exchange().number_of_first(found);  // by then nobody reads the memory of others any more
}

}  // namespace pykv
