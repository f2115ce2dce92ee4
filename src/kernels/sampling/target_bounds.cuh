// Between which distances from the largest logit the entry lies at which a sum of weights reaches a target.
#pragma once

#include "cuda/approximate.cuh"
#include "sampling/row_bins.cuh"
#include "sampling/row_passes.cuh"

namespace pykv {

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
template <bool kAhead, class T, class Value>
__device__ BoundedLargest bounds_with_largest(RowTeam& team, RowMemory& memory, const RowSlice<T>& slice, int num_cols,
                                              float scale, float top_p, Value value) {
  constexpr int kSize = kPackSize<T>;
  constexpr float kWithin = 30 * kBinsOfOctave, kMostPlace = 1 << 13;
  const float bins_of_logit = -kBinsOfOctave * scale;
  const BinUnit unit(num_cols, false);
  clear_bins(memory);
  float own_largest = -INFINITY, first_place = INFINITY;
  each_vector<2, false, kAhead>(slice, [&](int first, const Vec<float, kSize>& raw) {
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

}  // namespace pykv
