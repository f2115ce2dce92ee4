// A block, or where rows are few a cluster of them, draws the token of a row.  Three ways, by the row's parameters:
//
//   up to kMostListed of the first logits: they are found in one pass (top_k_candidates.cuh), sorted, and all else happens in
//     shared memory
//   all, or all above min_p: a pass for the largest where min_p wants it, and one that draws
//   by top_p: a pass for the largest, one that tells about where the border is, and one that draws of what may be above it.  A token
//     near the border wants a pass that adds up what comes before it; where that has the share already, all that is kept comes
//     before the token, and one of that is drawn
//   the rest: a pass for the largest, two for each of top_k and top_p (row_passes.cuh), and one that draws
//
// Passes after the first read from the second-level cache.  In the pass that draws, a token's noise is worked out only if its
// random number is small enough for it to win; the numbers themselves are most of the work.
#include "cuda/approximate.cuh"
#include "sampling/row_passes.cuh"
#include "sampling/sample.h"

namespace pykv {
namespace {

constexpr int kMostListed = 1024;
static_assert(kMostListed == 2 * kSelectThreads);

// What a token is drawn of: entries from `floor` on, not further from the largest than `at_most`.  In shared memory, as registers
// are rare.
struct Search {
  Entry floor;
  LogitWeights weights;
  float at_most;
  uint32_t best_key;  // of the scores that this block has found

  __device__ bool includes(float x, uint32_t column) const {
    return entry_of(key_of_logit(x), column) >= floor && !(weights.distance(x) > at_most);
  }
  // No lower logit is drawn.
  __device__ float least_logit() const {
    const float largest = fminf(weights.largest, 0x1.fffffep127f), rounding = fabsf(largest) * 0x1p-22f;
    const float within = largest - (at_most + 1.0f) / (kBinsOfOctave * weights.scale) - rounding;
    return fmaxf(floor == 0 ? -0x1.fffffep127f : logit_of_key(key_of(floor)), within);
  }
};

template <class T, bool kAdjusted>
class RowSampler {
 public:
  __device__ RowSampler(const SampleArgs& args, const RowSlice<T>& slice, const SampleRow& r,
                        const RowAdjustments& adjusted, RowTeam& team, RowMemory& memory, Search& search,
                        Entry* entries, int room)
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
    if (r_.k <= kMostListed && r_.k < args_.num_cols) {
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
    using Candidates = TopKCandidates<T, kVectors>;
    const int thread = threadIdx.x, k = r_.k;
    int n = Candidates::find(slice_, k, team_.exchange(), entries_, room_, memory_.select,
                             [&](float x, int column) { return value(x, column); });
    if (team_.rank() != 0) return false;
    n = first_entries(entries_, n, k, memory_.select);
    drawn.largest = logit_of_key(key_of(entries_[0]));
    if (key_of(entries_[0]) == kKeyOfNan || drawn.largest == -INFINITY) {
      drawn.entry = drawn.largest == -INFINITY ? 0 : entries_[0];
      return true;
    }
    // Two neighbours a thread.
    const float least = r_.least_logit(drawn.largest);
    float x[2];
    Mass mass[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * thread + i;
      x[i] = at < n ? logit_of_key(key_of(entries_[at])) : -INFINITY;
      if (x[i] < least) x[i] = -INFINITY;
      mass[i] = x[i] == -INFINITY ? 0 : mass_of(x[i], drawn.largest, r_.scale);
    }
    if (r_.top_p < 1.0f) {
      Mass total;
      const Mass before = team_.sum_before(mass[0] + mass[1], total), target = share_of(total, r_.top_p);
      if (before >= target) x[0] = -INFINITY;
      if (before + mass[0] >= target) x[1] = -INFINITY;
    }
    Mass kept = 0;
    Entry best = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (x[i] == -INFINITY) continue;
      kept += mass[i];
      const uint32_t token = static_cast<uint32_t>(args_.first_token) + index_of(entries_[2 * thread + i]);
      best = Larger()(best, drawn_entry(x[i], r_.inverse_temperature, r_.noise.word(token), token));
    }
    drawn.total = team_.reduce_block(kept, Plus());
    drawn.entry = team_.reduce_block(best, Larger());
    return true;
  }

  __device__ void draw_from_row(Drawn& drawn) {
    const bool by_k = r_.k != args_.num_cols, by_top_p = r_.top_p < 1.0f, tries = by_top_p && !args_.logprobs;
    Entry floor = 0;
    if (r_.greedy || by_k || by_top_p || r_.log_min_p != -INFINITY || args_.logprobs) {
      const Entry first = first_of_row();
      drawn.largest = logit_of_key(key_of(first));
      if (r_.greedy || first == 0 || key_of(first) == kKeyOfNan) {
        drawn.entry =
            first == 0 ? 0 : entry_of(key_of(first), static_cast<uint32_t>(args_.first_token) + index_of(first));
        return;
      }
      const float least = r_.least_logit(drawn.largest);
      if (least != -INFINITY) floor = Entry{key_of_logit(least)} << 32;
    }
    const auto own_value = [&](float x, int column) { return value(x, column); };
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      if (phase == 0 ? !by_k : !by_top_p || tries) continue;
      const LogitWeights weights{phase == 0, static_cast<uint64_t>(r_.k), drawn.largest, r_.scale, r_.top_p};
      floor = reach_target(team_, memory_, slice_, args_.num_cols, floor, weights, entries_, room_, own_value);
    }
    const LogitWeights masses_of{false, 0, drawn.largest, r_.scale, r_.top_p};
    TargetBounds bounds{-1.0f, INFINITY};
    if (tries) bounds = bounds_of_target(team_, memory_, slice_, args_.num_cols, floor, masses_of, own_value);
    if (threadIdx.x == 0) search_ = {floor, masses_of, bounds.at_most, 0};
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
    each_vector<kVectors>(slice_, [&](int first, const Vec<float, kSize>& raw) {
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
    each_vector<kAtOnce>(slice_, [&](int column, const Vec<float, kSize>& raw) {
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
    const float least = search_.least_logit(), scale = r_.scale;
    const uint32_t first_token = static_cast<uint32_t>(args_.first_token);
    // Vectors begin at the same place among the four tokens of a group.
    const uint32_t before = (first_token + static_cast<uint32_t>(slice_.first_vector)) % 4;
    Entry best = 0;
    uint32_t best_key = 0;  // of the scores that this warp knows of
    float reach = INFINITY;
    each_vector_ahead(slice_, [&](int column, const Pack<T>& raw) {
      uint32_t known = 0;
      if (threadIdx.x % 32 == 0) known = atomicMax(&search_.best_key, best_key);
      known = __shfl_sync(0xffffffffu, known, 0);
      if (known > best_key) {
        best_key = known;
        reach = reach_of(best_key);
      }
      const auto x_of = [&](int i) { return value(to_float(raw[i]), column + i); };
      float largest;
      if constexpr (kAdjusted) {
        largest = largest_of(values(column, to_floats(raw)));
      } else {
        largest = largest_of<T>(raw);
      }
      // NaN passes, whatever it is compared with.
      const auto can_win = [&](float x) { return !(x < least) && !(fmaf(x, scale, reach) < kLeastPower); };
      if (!__any_sync(0xffffffffu, can_win(largest))) return;
      uint32_t words[kSize + 4];
      find_words(words, column, before);
      const auto may_win = [&](float x, uint32_t word) {
        const float most = fmaf(power_of_2(fmaf(x, scale, reach)), 1.01f, 1.0000003f);
        return !(x < least) && !(__uint_as_float(word >> 9 | 0x3f800000u) > most);
      };
      uint32_t least_word = words[0];
#pragma unroll
      for (int i = 1; i < kSize; ++i) least_word = min(least_word, words[i]);
      // What all of them together cannot do, no one can.
      uint32_t undone = may_win(largest, least_word) ? (1u << kSize) - 1u : 0u;
#pragma unroll 1
      while (__any_sync(0xffffffffu, undone != 0)) {
        float own = 0.0f;
        uint32_t word = 0;
        int first = -1;
#pragma unroll
        for (int i = kSize - 1; i >= 0; --i) {
          const float x = x_of(i);
          if ((undone >> i & 1) != 0 && may_win(x, words[i])) {
            own = x;
            word = words[i];
            first = i;
          }
        }
        undone = first < 0 ? 0 : undone & (0xfffffffeu << first);
        const uint32_t at = static_cast<uint32_t>(column + first);
        if (first >= 0 && search_.includes(own, at))
          best = Larger()(best, drawn_entry(own, r_.inverse_temperature, word, first_token + at));
        const uint32_t own_key = __reduce_max_sync(0xffffffffu, key_of(best));
        if (own_key > best_key) {
          best_key = own_key;
          reach = reach_of(best_key);
        }
      }
    });
    return team_.reduce(best, Larger());
  }

  // What a logit in powers of 2 must have added for its score to be as good as the best one: it wins if -ln(1 - u) is below
  // 2^(scale x + reach), and so only if u is.
  static constexpr float kLeastPower = -33.0f;  // of a random number
  static __device__ float reach_of(uint32_t best_key) {
    const float score = logit_of_key(best_key);
    return score < INFINITY ? (0.01f + fabsf(score) * 1e-5f - score) * 1.44269504f
                            : -INFINITY;  // of infinity and NaN, only equals
  }

  // The random words of a vector.
  __device__ void find_words(uint32_t (&words)[kSize + 4], int column, uint32_t before) const {
    TokenNoise here = r_.noise;
    asm volatile("" : "+r"(here.key0), "+r"(here.key1));  // else the keys of all rounds would stay in registers
    const uint32_t group = (static_cast<uint32_t>(args_.first_token) + static_cast<uint32_t>(column)) / 4;
    const auto find = [&](int quad) {
      const FourWords found = here.group((group + quad) & 0x3fffffffu);  // before token 0, too
#pragma unroll
      for (int w = 0; w < 4; ++w) words[4 * quad + w] = found.w[w];
    };
#pragma unroll
    for (int quad = 0; quad < kSize / 4; ++quad) find(quad);
    if (before == 0) return;
    find(kSize / 4);
    if (before & 1)
#pragma unroll
      for (int w = 0; w < kSize + 3; ++w) words[w] = words[w + 1];
    if (before & 2)
#pragma unroll
      for (int w = 0; w < kSize + 2; ++w) words[w] = words[w + 2];
  }

  const SampleArgs& args_;
  const RowSlice<T>& slice_;
  const SampleRow& r_;  // in shared memory, both: registers are rare
  const RowAdjustments& adjusted_;
  RowTeam& team_;
  RowMemory& memory_;
  Search& search_;
  Entry* entries_;
  int room_;
};

template <class T, bool kAdjusted>
__global__ __launch_bounds__(kSelectThreads,
                             kAdjusted ? 1 : 2) void sample_kernel(const __grid_constant__ SampleArgs args, int blocks,
                                                                   int room,
                                                                   const __grid_constant__ Reporter reporter) {
  extern __shared__ __align__(16) Entry entries[];
  __shared__ RowMemory memory;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  RowTeam team(memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  const RowSlice<T> slice(static_cast<const T*>(args.logits) + row * args.logit_stride, args.num_cols, team.rank(),
                          blocks);
  begin_dependent();
  __shared__ SampleRow of_row;
  __shared__ Search search;
  __shared__ alignas(RowAdjustments) char adjusted[sizeof(RowAdjustments)];
  if (threadIdx.x == 0) {
    of_row = sample_row(args, row);
    new (adjusted) RowAdjustments(args.adjustments, row);
  }
  __syncthreads();
  team.wait_for_blocks();
  RowSampler<T, kAdjusted>(args, slice, of_row, *reinterpret_cast<const RowAdjustments*>(adjusted), team, memory,
                           search, entries, room)
      .draw(row, reporter);
}

}  // namespace

void sample_cuda(const SampleArgs& args, const Launch& launch) {
  const int blocks = blocks_for_row(args.num_rows, args.num_cols, 8, launch);
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    const int room = TopKCandidates<T, 1>::room(kMostListed, blocks);
    dispatch_bool(args.adjustments.any(), [&]<bool kAdjusted>() {
      launch_rows<sample_kernel<T, kAdjusted>>(args.num_rows, blocks, kSelectThreads,
                                               room * static_cast<int>(sizeof(Entry)), launch, "sample", args, blocks,
                                               room, launch.reporter("sample: logits"));
    });
  });
}

}  // namespace pykv
