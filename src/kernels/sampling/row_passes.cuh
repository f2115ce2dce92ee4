// Passes over the part of a row that a block has.
#pragma once

#include "sampling/arithmetic.h"
#include "sampling/row_team.cuh"

namespace pykv {

// body(column of the first, the vector's logits), for the vectors of this thread; all threads of a warp come together.  A pass that
// goes backwards begins with what the one before it has left in the L2.  kAhead: the next vectors are loaded while these are worked
// on, which wants registers.
template <int kVectors, bool kBackwards = false, bool kAhead = false, int kThreads = kSelectThreads, class T,
          class Body>
__device__ void each_vector(const RowSlice<T>& slice, Body body) {
  constexpr int kSize = kPackSize<T>, kStep = kThreads * kSize, kGroup = kVectors * kStep;
  const int groups = (slice.end - slice.first_vector + kGroup - 1) / kGroup;
  const auto first_of = [&](int group) {
    return slice.first_vector + (kBackwards ? groups - 1 - group : group) * kGroup +
           static_cast<int>(threadIdx.x) * kSize;
  };
  const auto load = [&](int group, Pack<T>(&raw)[kVectors]) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = slice.load(first_of(group) + v * kStep);
  };
  Pack<T> next[kVectors];
  if (kAhead) load(0, next);
  for (int group = 0; group < groups; ++group) {
    Pack<T> raw[kVectors];
    if (kAhead) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) raw[v] = next[v];
      load(group + 1, next);
    } else {
      load(group, raw);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) body(first_of(group) + v * kStep, to_floats(raw[v]));
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

// body(first column, the largest logit) for runs of 16 columns, of which each lane of a warp gets one of 32; all lanes come together,
// and each warp comes, if to runs outside the row, where the largest is -infinity.  largest(column of the first, the vector).
template <int kVectors, int kThreads, class T, class Largest, class Body>
__device__ void each_run(const RowSlice<T>& slice, Largest largest, Body body) {
  constexpr int kSize = kPackSize<T>, kRun = 16, kParts = kRun / kSize, kRunsOfWarp = 32;
  static_assert(kVectors % kParts == 0 && (kParts == 2 || kParts == 4));
  constexpr int kStep = kVectors * 32 * kSize;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int first = slice.first_vector + warp * kStep;
  Pack<T> raw[kVectors];
  const auto load = [&] {
    const bool is_inside = first >= slice.begin && first + kStep <= slice.end;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + (v * 32 + lane) * kSize;
      raw[v] = is_inside ? load_vec_in_order<Pack<T>>(slice.row + column) : slice.load(column);
    }
  };
  load();
#pragma unroll 1
  do {
    float x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v] = largest(first + (v * 32 + lane) * kSize, raw[v]);
    const int here = first;
    first += kThreads / 32 * kStep;
    load();  // while these are worked on
#pragma unroll
    for (int v = 0; v < kVectors; v += kParts) {
      // A run lies in neighbouring lanes, of which each collects that of another vector.
#pragma unroll
      for (int distance = kParts / 2; distance > 0; distance /= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = v; i < v + distance; ++i) {
          const float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + distance], distance);
          x[i] = larger_or_nan(upper ? x[i + distance] : x[i], other);
        }
      }
      const int run = lane % kParts * (kRunsOfWarp / kParts) + lane / kParts;
      body(here + v * 32 * kSize + run * kRun, x[v]);
    }
  } while (first < slice.end);
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
  each_vector<kVectors, true>(slice, [&](int first, Vec<float, kSize> x) {
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

}  // namespace pykv
