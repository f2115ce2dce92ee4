// A pass for the largest of a row, two for each of top_k and top_p (reach_target.cuh), one for the sum where probabilities are
// wanted, and one that writes.  Passes after the first read from the second-level cache.
#include "sampling/reach_target.cuh"
#include "sampling/row_filter.h"
#include "sampling/row_passes.cuh"

namespace pykv {
namespace {

// Weights for reach_target, of logits or of probabilities.
template <bool kProbabilities>
struct RowWeights {
  const FilterRow& r;
  bool are_counts;
  float largest, exponent_of_largest;

  __device__ uint64_t target(uint64_t total) const {
    return are_counts ? static_cast<uint64_t>(r.k) : share_of(total, r.top_p);
  }
  __device__ float share(float x) const { return r.template share<kProbabilities>(x, largest); }
  __device__ float distance(float x) const {
    if constexpr (kProbabilities) return x > 0.0f ? (exponent_of_largest - __log2f(x)) * kBinsOfOctave : INFINITY;
    return bins_below(x, largest, r.scale);
  }
};

template <class T, bool kProbabilities>
__global__ __launch_bounds__(kSelectThreads,
                             2) void row_filter_kernel(const __grid_constant__ RowFilterArgs args, int blocks, int room,
                                                       const __grid_constant__ Reporter row_reporter,
                                                       const __grid_constant__ Reporter token_reporter) {
  extern __shared__ __align__(16) Entry entries[];
  __shared__ RowMemory memory;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  const int thread = threadIdx.x;
  RowTeam team(memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  const T* input = static_cast<const T*>(args.input) + row * args.input_stride;
  const RowSlice<T> slice(input, args.num_cols, team.rank(), blocks);
  slice.prefetch_first();
  begin_dependent();
  const FilterRow r = filter_row(args, row);
  const auto plain = [](float x, int) { return x; };

  // The largest by its key, which that of NaN exceeds.
  constexpr int kSize = kPackSize<T>;
  float own_largest = -INFINITY;
  each_vector<4>(slice,
                 [&](int, const Vec<float, kSize>& x) { own_largest = larger_or_nan(own_largest, largest_of(x)); });
  team.wait_for_blocks();
  const uint32_t key = static_cast<uint32_t>(team.reduce(key_of_logit(own_largest), Larger()));
  const float largest = logit_of_key(key);
  const bool has_nan = key == kKeyOfNan || (kProbabilities && largest == INFINITY);  // whose share would be
  const bool is_empty = !has_nan && !(largest > (kProbabilities ? 0.0f : -INFINITY));
  const bool is_bad = has_nan || is_empty;
  if (is_bad && team.rank() == 0 && thread == 0) row_reporter(row, has_nan ? kRowHasNan : kRowIsEmpty);

  Entry floor = 0;
  if (!is_bad && !r.keeps_all()) {
    const float least = r.least(largest);
    if (least != -INFINITY) floor = Entry{key_of_logit(least)} << 32;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      if (phase == 0 ? r.k == 0 : r.top_p >= 1.0f) continue;
      const RowWeights<kProbabilities> weights{r, phase == 0, largest, kProbabilities ? __log2f(largest) : 0.0f};
      floor = reach_target(team, memory, slice, args.num_cols, floor, weights, entries, room, plain);
    }
  }
  const auto entry_at = [](float x, int column) { return entry_of(key_of_logit(x), static_cast<uint32_t>(column)); };
  const bool as_it_is = args.result == RowResult::kLogits;
  float total = 1.0f;
  if (!is_bad && !as_it_is) {
    const auto share = [&](float x) { return r.template share<kProbabilities>(x, largest); };
    const Mass sum = sum_of_shares<2>(slice, floor, share);
    total = static_cast<float>(team.reduce(sum, Plus())) * 0x1p-40f;
  }

  if (args.result == RowResult::kTokenLogprobs) {
    const float log_total = is_bad ? 0.0f : log_of(total);
#pragma unroll 1
    for (int i = 0; i < args.num_tokens; ++i) {
      const int64_t token = args.token(row, i);
      const bool there = token >= 0 && token < args.num_cols, writes = team.rank() == 0 && thread == 0;
      const float x = there ? to_float(input[token]) : 0.0f;
      if (writes) {
        if (!there) token_reporter(token, args.num_cols);
        static_cast<float*>(args.out)[row * args.out_stride + i] =
            is_bad || !there ? __int_as_float(0x7fc00000) : fused(below(x, largest), r.inverse_temperature, -log_total);
      }
      if (!args.ranks) continue;
      uint64_t rank = 0;
      if (there) {
        const Entry own = entry_at(x, static_cast<int>(token));
        each_logit(slice, plain, [&](float y, int column) { rank += entry_at(y, column) > own; });
        rank = team.reduce(rank, Plus());
      }
      if (writes) args.ranks[row * args.rank_stride + i] = there ? static_cast<int32_t>(rank) : -1;
    }
  } else {
    const EntryBound bound(floor);
    const bool keeps_all = floor == 0;  // NaN, too
    const auto write_to = [&](auto* out, auto result, float of_others) {
      using Out = std::remove_pointer_t<decltype(out)>;
      const bool in_vectors = reinterpret_cast<uintptr_t>(out + slice.first_vector) % 16 == 0;
      each_vector<1>(slice, [&](int first, const Vec<float, kSize>& x) {
        Vec<float, kSize> y;
#pragma unroll
        for (int i = 0; i < kSize; ++i) y[i] = result(x[i]);
        if (!keeps_all)
#pragma unroll
          for (int i = 0; i < kSize; ++i)
            if (!bound.includes(x[i], first + i)) y[i] = of_others;
        if (in_vectors && first >= slice.begin && first <= slice.end - kSize) {
          constexpr int kAtOnce = kPackSize<Out>;
#pragma unroll
          for (int i = 0; i < kSize; i += kAtOnce) {
            Vec<float, kAtOnce> part;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) part[j] = y[i + j];
            store_vec(out + first + i, round_to<Out>(part));
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i)
            if (first + i >= slice.begin && first + i < slice.end) out[first + i] = from_float<Out>(y[i]);
        }
      });
    };
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    const float of_largest = is_bad ? __int_as_float(0x7fc00000) : 1.0f / total;
    const auto probability = [&](float x) { return r.template share<kProbabilities>(x, largest) * of_largest; };
    if (as_it_is) {
      write_to(out, [](float x) { return x; }, -INFINITY);
    } else if (args.out_dtype == DType::kFloat32) {
      write_to(static_cast<float*>(args.out) + row * args.out_stride, probability, 0.0f);
    } else {
      write_to(out, probability, 0.0f);
    }
  }
}

}  // namespace

void row_filter_cuda(const RowFilterArgs& args, const Launch& launch) {
  constexpr int room = 4096;
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    dispatch_bool(args.of_probabilities, [&]<bool kProbabilities>() {
      const int blocks =
          blocks_for_row<row_filter_kernel<T, kProbabilities>>(args.num_rows, args.num_cols, kMostBlocks, launch);
      launch_rows<row_filter_kernel<T, kProbabilities>>(
          args.num_rows, blocks, kSelectThreads, room * static_cast<int>(sizeof(Entry)), launch, "row_filter", args,
          blocks, room, launch.reporter(args.report), launch.reporter("token_logprobs: token_ids"));
    });
  });
}

}  // namespace pykv
