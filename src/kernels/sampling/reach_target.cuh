// The entry at which a sum of weights reaches a target: it is between bounds, in a list or in more passes.
#pragma once

#include "sampling/target_bounds.cuh"

namespace pykv {

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
