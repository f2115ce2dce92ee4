// How a block, or where rows are few a cluster of them, draws the token of a row.  Four ways, by the row's parameters:
//
//   up to kMostListed of the first logits: they are found in one pass (top_k_candidates.cuh), sorted, and all else happens in
//     shared memory
//   all, or all above min_p: a pass for the largest where min_p wants it, and one that draws
//   by top_p: a pass that finds the largest and tells about where the border is (two, where there is min_p or top_k as well), and
//     one that draws of what may be above it.  A token near the border wants a pass that adds up what comes before it; where that
//     has the share already, all that is kept comes before the token, and one of that is drawn
//   the rest: a pass for the largest, two for each of top_k and top_p (reach_target.cuh), and one that draws
//
// Passes after the first read from the second-level cache.  The pass that draws looks at 16 tokens together: only where the most
// noise that one of them has might let the largest logit win, the noise of each is worked out.
#pragma once

#include "cuda/approximate.cuh"
#include "sampling/reach_target.cuh"
#include "sampling/sample.h"
#include "sampling/token_noise.cuh"

namespace pykv {

constexpr int kMostListed = 1024;
static_assert(kMostListed <= 2 * kSelectThreads);

// What a token is drawn of: entries from `floor` on, not further from the largest than `at_most`.  In shared memory, as registers
// are rare.
struct Search {
  Entry floor;
  LogitWeights weights;
  float at_most;
  uint32_t best_key;  // of the scores that this block has found
  NoiseRounds noise;

  __device__ bool includes(float x, uint32_t column) const {
    return entry_of(key_of_logit(x), column) >= floor && !(weights.distance(x) > at_most);
  }
  // No lower logit is drawn.
  __device__ float least_logit() const {
    constexpr float kLargest = 0x1.fffffep127f;
    float least = floor == 0 ? -kLargest : logit_of_key(key_of(floor));
    if (at_most < INFINITY) {
      const float largest = fminf(weights.largest, kLargest), rounding = fabsf(largest) * 0x1p-22f;
      least = fmaxf(least, largest - (at_most + 1.0f) / (kBinsOfOctave * weights.scale) - rounding);
    }
    return least;
  }
};

// Nearly.
__device__ inline float logarithm_of_2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// kPlain: nothing but temperatures is given, and so there is less code, for which registers suffice.  kAhead: passes load what
// comes next while they work, which wants registers.  kThreads: of a block; others than kSelectThreads with kPlain alone.
template <class T, bool kAdjusted, bool kPlain, bool kAhead, int kThreads = kSelectThreads>
class RowSampler {
 public:
  __device__ RowSampler(const SampleArgs& args, const RowSlice<T>& slice, const SampleRow& r,
                        const RowAdjustments& adjusted, RowTeamOf<kThreads / 32>& team, RowMemory& memory,
                        Search& search, Entry* entries, int room)
      : args_(args),
        adjusted_(adjusted),
        slice_(slice),
        r_(r),
        team_(team),
        memory_(memory),
        search_(search),
        entries_(entries),
        room_(room) {}

  __device__ void draw(int64_t row, const Reporter& reporter) {
    Drawn drawn{0, 0.0f, 0.0f, 0};
    if constexpr (kPlain) {
      draw_from_all(drawn);
    } else if (r_.k <= kMostListed && r_.k < args_.num_cols) {
      if (!draw_from_list(drawn)) return;
    } else {
      draw_from_row(drawn);
    }
    if (team_.rank() != 0 || threadIdx.x != 0) return;
    if (args_.logprobs && drawn.entry != 0 && key_of(drawn.entry) != kKeyOfNan) {
      drawn.logit = adjusted_logit(static_cast<int>(index_of(drawn.entry)) - args_.first_token);
    }
    store_drawn(args_, row, r_, drawn, [&](int64_t at, long long what) { reporter(at, what); });
  }

 private:
  static constexpr int kSize = kPackSize<T>;
  static constexpr int kVectors = kAdjusted ? 1 : 2;  // adjustments are much code for each logit

  // What a logit counts as.  Outside the row it is -infinity already.
  __device__ float value(float x, int column) const {
    if constexpr (kAdjusted) {
      return column >= slice_.begin && column < slice_.end ? adjusted_(x, column) : x;
    } else {
      return x;
    }
  }

  __device__ Vec<float, kSize> values(int column, const Vec<float, kSize>& raw) const {
    Vec<float, kSize> x;
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = value(raw[i], column + i);
    return x;
  }

  __device__ float adjusted_logit(int column) const {
    const float x = to_float(slice_.row[column]);
    if constexpr (kAdjusted) return adjusted_(x, column);
    return x;
  }

  // False in blocks whose part is done.
  __device__ bool draw_from_list(Drawn& drawn) {
    using Candidates = TopKCandidates<T, kAdjusted ? 1 : 4, kAhead>;
    const int thread = threadIdx.x, k = r_.k;
    constexpr float kLeastFinite = -0x1.fffffep127f;
    int n = Candidates::find(slice_, k, kLeastFinite, team_.exchange(), entries_, room_, memory_.select,
                             [&](float x, int column) { return value(x, column); });
    if (team_.rank() != 0) return false;
    if (n == 0) return true;  // nothing but -infinity
    n = first_entries(entries_, n, k, memory_.select);
    drawn.largest = logit_of_key(key_of(entries_[0]));
    if (key_of(entries_[0]) == kKeyOfNan) {
      drawn.entry = entries_[0];
      return true;
    }
    // One for each thread, or two neighbours.
    const int each = n > kSelectThreads ? 2 : 1;
    const float least = r_.least(drawn.largest);
    float x[2];
    Mass mass[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = each * thread + i;
      x[i] = at < n && i < each ? logit_of_key(key_of(entries_[at])) : -INFINITY;
      if (x[i] < least) x[i] = -INFINITY;
      mass[i] = x[i] == -INFINITY ? 0 : mass_of(x[i], drawn.largest, r_.scale);
    }
    if (r_.top_p < 1.0f) {
      Mass total;
      const Mass before = team_.sum_before_in_block(mass[0] + mass[1], total), target = share_of(total, r_.top_p);
      if (before >= target) x[0] = -INFINITY;
      if (before + mass[0] >= target) x[1] = -INFINITY;
    }
    Mass kept = 0;
    Entry best = 0;
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
      const float own = i == 0 ? x[0] : x[1];
      if (own == -INFINITY) continue;
      kept += i == 0 ? mass[0] : mass[1];
      const uint32_t token = static_cast<uint32_t>(args_.first_token) + index_of(entries_[each * thread + i]);
      best = Larger()(best, drawn_entry(own, r_.inverse_temperature, noise_of(token), token));
    }
    if (args_.logprobs) drawn.total = team_.reduce_block(kept, Plus());
    drawn.entry = team_.reduce_block(best, Larger());
    return true;
  }

  __device__ void draw_from_all(Drawn& drawn) {
    if (r_.greedy) {
      take_first(first_of_row(), drawn);
      return;
    }
    if (threadIdx.x == 0) search_ = {0, {false, 0, 0.0f, r_.scale, 1.0f}, INFINITY, 0, NoiseRounds(r_.noise)};
    __syncthreads();
    drawn.entry = best_of_row();
  }

  // What a row with this first entry gives, if it is greedy, NaN or empty.
  __device__ void take_first(Entry first, Drawn& drawn) const {
    drawn.entry = first == 0 ? 0 : entry_of(key_of(first), static_cast<uint32_t>(args_.first_token) + index_of(first));
  }

  __device__ void draw_from_row(Drawn& drawn) {
    const bool by_k = r_.k != args_.num_cols, by_top_p = r_.top_p < 1.0f, tries = by_top_p && !args_.logprobs;
    const auto own_value = [&](float x, int column) { return value(x, column); };
    Entry floor = 0;
    TargetBounds bounds{-1.0f, INFINITY};
    bool is_bounded = !tries;
    if (tries && !r_.greedy && !by_k && r_.log_min_p == -INFINITY) {
      const BoundedLargest first =
          bounds_with_largest<kAhead>(team_, memory_, slice_, args_.num_cols, r_.scale, r_.top_p, own_value);
      drawn.largest = first.largest;
      if (!(first.largest > -INFINITY)) {
        drawn.entry = first.largest == -INFINITY ? 0 : entry_of(kKeyOfNan, 0);
        return;
      }
      bounds = first.bounds;
      is_bounded = first.is_bounded;
    } else if (r_.greedy || by_k || by_top_p || r_.log_min_p != -INFINITY || args_.logprobs) {
      const Entry first = first_of_row();
      drawn.largest = logit_of_key(key_of(first));
      if (r_.greedy || first == 0 || key_of(first) == kKeyOfNan) {
        take_first(first, drawn);
        return;
      }
      const float least = r_.least(drawn.largest);
      if (least != -INFINITY) floor = Entry{key_of_logit(least)} << 32;
    }
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      if (phase == 0 ? !by_k : !by_top_p || tries) continue;
      const LogitWeights weights{phase == 0, static_cast<uint64_t>(r_.k), drawn.largest, r_.scale, r_.top_p};
      floor = reach_target(team_, memory_, slice_, args_.num_cols, floor, weights, entries_, room_, own_value);
    }
    const LogitWeights masses_of{false, 0, drawn.largest, r_.scale, r_.top_p};
    if (!is_bounded) bounds = bounds_of_target(team_, memory_, slice_, args_.num_cols, floor, masses_of, own_value);
    if (threadIdx.x == 0) search_ = {floor, masses_of, bounds.at_most, 0, NoiseRounds(r_.noise)};
    __syncthreads();
    Mass target = 0;
#pragma unroll 1
    while (true) {
      drawn.entry = best_of_row();
      if (!(tries || args_.logprobs) || drawn.entry == 0 || key_of(drawn.entry) == kKeyOfNan) break;
      const int column = static_cast<int>(index_of(drawn.entry)) - args_.first_token;
      const float logit = adjusted_logit(column);
      if (search_.weights.distance(logit) <= bounds.surely) break;
      const Masses masses = add_masses(floor, logit, column, drawn.largest);
      if (target == 0) {
        drawn.total = team_.reduce(masses.all, Plus());
        target = share_of(drawn.total, r_.top_p);
      }
      if (!tries || team_.reduce(masses.before, Plus()) < target) break;
      if (threadIdx.x == 0) {
        search_.floor = entry_of(key_of_logit(logit), static_cast<uint32_t>(column)) + 1;
        search_.best_key = 0;
      }
      __syncthreads();
    }
  }

  // Sums of this thread: of all entries from `floor` on, and of those of them that come before the entry of (logit, its_column).
  struct Masses {
    Mass all, before;
  };
  __device__ Masses add_masses(Entry floor, float logit, int its_column, float largest) {
    const float scale = r_.scale, next_smaller = next_below(logit);
    const EntryBound candidates(floor);
    Masses sums{0, 0};
    each_vector<kVectors, false, kAhead>(slice_, [&](int first, const Vec<float, kSize>& raw) {
      Vec<float, kSize> x = values(first, raw);
      if (floor != 0)
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          if (!candidates.includes(x[i], first + i)) x[i] = -INFINITY;
      // Of equal logits, those in lower columns come before it.
      const float bound = first < its_column ? next_smaller : logit;
      MassSum all, before;
      uint32_t num_before = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        MassSum own;
        own.add(share_of_largest(x[i], largest, scale));
        all += own;
        if (x[i] > bound) {
          before += own;
          ++num_before;
        }
      }
      const int place = its_column - first;
      if (place > 0 && place < kSize) {  // in its own vector, it and equal ones behind it were taken for lower ones
        MassSum of_equal;
        of_equal.add(share_of_largest(logit, largest, scale));
#pragma unroll
        for (int i = 1; i < kSize; ++i)
          if (i >= place && x[i] == logit) {
            before -= of_equal;
            --num_before;
          }
      }
      sums.all += all.of(kSize);
      sums.before += before.of(num_before);
    });
    return sums;
  }

  // The row's first entry; 0 if there is nothing but -infinity.
  __device__ Entry first_of_row() {
    constexpr int kAtOnce = kAdjusted ? 1 : 4;
    float largest = -INFINITY;
    int at = 0;  // the vector with the first one; before column 0, too
    each_vector<kAtOnce, false, kAhead, kThreads>(slice_, [&](int column, const Vec<float, kSize>& raw) {
      const float x = largest_of(values(column, raw));
      if (x <= largest || largest != largest) return;  // columns ascend; nothing comes before NaN
      largest = x;
      at = column;
    });
    Entry first = 0;
    if (largest != -INFINITY) {
      const Vec<float, kSize> x = values(at, to_floats(slice_.load(at)));
#pragma unroll
      for (int i = kSize - 1; i >= 0; --i)
        if (x[i] == largest || x[i] != x[i]) first = entry_of(key_of_logit(x[i]), static_cast<uint32_t>(at + i));
    }
    return team_.reduce(first, Larger());
  }

  // What wins among those that are searched.
  __device__ Entry best_of_row() {
    constexpr int kGroup = TokenNoise::kGroup;
    const float least = search_.least_logit(), scale = r_.scale;
    Entry best = 0;
    uint32_t best_key = 0;     // of the scores that this warp knows of
    float wanted = -INFINITY;  // what a run of columns needs of `chance` to reach it
    const auto learn = [&](uint32_t key) {
      if (key <= best_key) return;
      best_key = key;
      wanted = chance_of_score(logit_of_key(key));
    };
    const auto try_column = [&](int column, bool is_tried, auto noise) {
      Entry own = 0;
      if (is_tried && column >= slice_.begin && column < slice_.end) {
        const float x = adjusted_logit(column);
        const uint32_t token = static_cast<uint32_t>(args_.first_token + column);
        if (search_.includes(x, static_cast<uint32_t>(column)))
          own = drawn_entry(x, r_.inverse_temperature, noise(token), token);
      }
      best = Larger()(best, own);
      const uint32_t found = __reduce_max_sync(0xffffffffu, key_of(own));
      if (found > best_key && threadIdx.x % 32 == 0) atomicMax(&search_.best_key, found);
      learn(found);
    };
    const auto largest_of_vector = [&](int column, const Pack<T>& raw) {
      if constexpr (kAdjusted) {
        return largest_of(values(column, to_floats(raw)));
      } else {
        return largest_of<T>(raw);
      }
    };
    bool is_first = true;
    each_run<16 / kSize, kThreads>(slice_, largest_of_vector, [&](int column, float largest) {
      const auto learn_of_block = [&] { learn(*const_cast<volatile uint32_t*>(&search_.best_key)); };
      learn_of_block();
      constexpr float kMostOfNoise = 38.0f;  // of the least number there is, as a power of 2
      const bool can_win =
          !(largest == -INFINITY) && !(largest < least) && !(fmaf(largest, scale, kMostOfNoise) < wanted);
      if (!is_first && !__any_sync(0xffffffffu, can_win)) return;
      const int token = args_.first_token + column;
      int group = token >> 4;  // before token 0, too
      static_assert(kGroup == 16);
      FourWords words = least_of_group(group);
      if (token % kGroup != 0) {  // the run lies in two groups, and all runs of this pass do
        const FourWords next = least_of_group(group + 1);
        if (next.w[0] < words.w[0]) {
          words = next;
          ++group;
        }
      }
      // The score of none is above this, but for the unit: powers of 2.  NaN is not below anything.
      const float chance =
          fmaf(largest, scale, 4.0f - logarithm_of_2(__uint_as_float(words.w[0] >> 9 | 0x3f800000u) - 1.0f));
      const auto may_win = [&] { return can_win && !(chance < wanted); };
      if (__any_sync(0xffffffffu, may_win())) {  // first what has the group's least number
        const int place = static_cast<int>(TokenNoise::place_of_least(words.w[1]));
        try_column(group * kGroup + place - args_.first_token, may_win(),
                   [&](uint32_t) { return -log_of(TokenNoise::least_number(words.w[0])); });
      }
      if (is_first) {  // what all warps have found spares them most of what follows
        __syncthreads();
        learn_of_block();
        is_first = false;
      }
      // Then all columns of what may still win, two runs at once.
      uint32_t undone = __ballot_sync(0xffffffffu, may_win());
      while (undone != 0) {
        const int one = __ffs(static_cast<int>(undone)) - 1;
        undone &= undone - 1;
        const int other = undone != 0 ? __ffs(static_cast<int>(undone)) - 1 : one;
        undone &= undone - 1;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        try_column(__shfl_sync(0xffffffffu, column, lane < kGroup ? one : other) + lane % kGroup, true,
                   [&](uint32_t its) { return noise_of(its); });
        undone &= __ballot_sync(0xffffffffu, may_win());
      }
    });
    return team_.reduce(best, Larger());
  }

  // Rounded down.  Only what is equal reaches infinity and NaN.
  static __device__ float chance_of_score(float score) {
    return score < INFINITY ? (score - 0.01f - fabsf(score) * 1e-5f) * 1.44269504f : INFINITY;
  }

  // Keys of Philox that the compiler does not know, else those of all rounds would stay in registers.
  template <class Noise>
  static __device__ Noise opaque(Noise noise) {
    asm volatile("" : "+r"(noise.key0), "+r"(noise.key1));
    return noise;
  }
  __device__ FourWords least_of_group(int group) const {
    return opaque(search_.noise).least_of_group(static_cast<uint32_t>(group));
  }
  __device__ float noise_of(uint32_t token) const { return opaque(r_.noise)(token); }

  const SampleArgs& args_;
  const RowSlice<T>& slice_;
  const SampleRow& r_;  // in shared memory, both: registers are rare
  const RowAdjustments& adjusted_;
  RowTeamOf<kThreads / 32>& team_;
  RowMemory& memory_;
  Search& search_;
  Entry* entries_;
  int room_;
};

}  // namespace pykv
