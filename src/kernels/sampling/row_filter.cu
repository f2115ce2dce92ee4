// A pass for the largest of a row, two for each of top_k and top_p (reach_target.cuh), one for the sum where probabilities are
// wanted, and one that writes.  Passes after the first read from the second-level cache; softmax alone keeps rows in shared memory.
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

// Results for the vector that begins with column `first`, of the row that lies at `out`.
template <class T, class Out>
__device__ void store_results(Out* out, const RowSlice<T>& slice, int first, const Vec<float, kPackSize<T>>& y) {
  constexpr int kSize = kPackSize<T>, kAtOnce = kPackSize<Out>;
  const bool in_vectors = reinterpret_cast<uintptr_t>(out + slice.first_vector) % 16 == 0;
  if (in_vectors && first >= slice.begin && first <= slice.end - kSize) {
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
}

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
      each_vector<1>(slice, [&](int first, const Vec<float, kSize>& x) {
        Vec<float, kSize> y;
#pragma unroll
        for (int i = 0; i < kSize; ++i) y[i] = result(x[i]);
        if (!keeps_all)
#pragma unroll
          for (int i = 0; i < kSize; ++i)
            if (!bound.includes(x[i], first + i)) y[i] = of_others;
        store_results(out, slice, first, y);
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

// Softmax alone.  A block keeps its columns in shared memory as floats, so that a row is read once and a share worked out once; a
// thread has vectors of its own there.
template <class T>
__global__ __launch_bounds__(kSelectThreads, 3) void softmax_kernel(const __grid_constant__ RowFilterArgs args,
                                                                    int blocks,
                                                                    const __grid_constant__ Reporter reporter) {
  extern __shared__ __align__(16) float4 kept[];
  __shared__ TeamMemory memory;
  constexpr int kSize = kPackSize<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  const int thread = threadIdx.x;
  RowTeam team(memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  const RowSlice<T> slice(static_cast<const T*>(args.input) + row * args.input_stride, args.num_cols, team.rank(),
                          blocks);
  slice.prefetch_first();
  begin_dependent();
  const FilterRow r = filter_row(args, row);
  const int vectors = (slice.end - slice.first_vector + kSize - 1) / kSize;
  const auto column_of = [&](int vector) { return slice.first_vector + vector * kSize; };
  // Quarters of 16 bytes of neighbouring threads lie side by side.
  const auto keep = [&](int vector, const Vec<float, kSize>& x) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) kept[i / 4 * vectors + vector] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
  };
  const auto kept_at = [&](int vector) {
    Vec<float, kSize> x;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 four = kept[i / 4 * vectors + vector];
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
    return x;
  };

  float own_largest = -INFINITY;
  constexpr int kAtOnce = 4;
  for (int first = thread; first < vectors; first += kAtOnce * kSelectThreads) {
    Pack<T> raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) raw[i] = slice.load(column_of(first + i * kSelectThreads));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      own_largest = larger_or_nan(own_largest, largest_of<T>(raw[i]));
      if (first + i * kSelectThreads < vectors) keep(first + i * kSelectThreads, to_floats(raw[i]));
    }
  }
  team.wait_for_blocks();
  const uint32_t key = static_cast<uint32_t>(team.reduce(key_of_logit(own_largest), Larger()));
  const float largest = logit_of_key(key);
  const bool has_nan = key == kKeyOfNan, is_bad = has_nan || largest == -INFINITY;
  if (is_bad && team.rank() == 0 && thread == 0) reporter(row, has_nan ? kRowHasNan : kRowIsEmpty);

  Mass own = 0;
#pragma unroll 2
  for (int vector = thread; vector < vectors; vector += kSelectThreads) {
    Vec<float, kSize> x = kept_at(vector);
    MassSum sum;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum.add(x[i] = r.template share<false>(x[i], largest));
    own += sum.of(kSize);
    keep(vector, x);
  }
  const float total = static_cast<float>(team.reduce(own, Plus())) * 0x1p-40f;

  const float of_largest = is_bad ? __int_as_float(0x7fc00000) : 1.0f / total;
#pragma unroll 2
  for (int vector = thread; vector < vectors; vector += kSelectThreads) {
    Vec<float, kSize> x = kept_at(vector);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] *= of_largest;
    if (args.out_dtype == DType::kFloat32) {
      store_results(static_cast<float*>(args.out) + row * args.out_stride, slice, column_of(vector), x);
    } else {
      store_results(static_cast<T*>(args.out) + row * args.out_stride, slice, column_of(vector), x);
    }
  }
}

// How many blocks share a row of softmax: so many that three of them find room on a multiprocessor, or at least one.  0: that is
// not possible.
template <class T>
int blocks_for_softmax(const RowFilterArgs& args, const Launch& launch, int& shared_bytes) {
  constexpr int kThreeFit = 72 << 10, kOneFits = 190 << 10;
  int blocks = blocks_for_row<softmax_kernel<T>>(args.num_rows, args.num_cols, launch);
  if (!overlaps_kernels(launch.device)) return 0;
  const auto bytes_of = [&](int count) {
    const int64_t vectors = args.num_cols / kPackSize<T> + 2;
    return static_cast<int>(
        std::min(((vectors + count - 1) / count + 3) * kPackSize<T> * int64_t{sizeof(float)}, int64_t{INT32_MAX}));
  };
  while (blocks < kPortableBlocks && bytes_of(blocks) > kThreeFit) blocks *= 2;
  shared_bytes = bytes_of(blocks);
  return shared_bytes <= kOneFits ? blocks : 0;
}

}  // namespace

void row_filter_cuda(const RowFilterArgs& args, const Launch& launch) {
  constexpr int room = 4096;
  const bool is_softmax = args.result == RowResult::kProbabilities && !args.of_probabilities && !args.top_k.given &&
                          !args.top_p.given && !args.min_p.given;
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if (int bytes = 0; is_softmax) {
      if (const int blocks = blocks_for_softmax<T>(args, launch, bytes))
        return launch_rows<softmax_kernel<T>>(args.num_rows, blocks, kSelectThreads, bytes, launch, "row_filter", args,
                                              blocks, launch.reporter(args.report));
    }
    dispatch_bool(args.of_probabilities, [&]<bool kProbabilities>() {
      const int blocks = blocks_for_row<row_filter_kernel<T, kProbabilities>>(args.num_rows, args.num_cols, launch);
      launch_rows<row_filter_kernel<T, kProbabilities>>(
          args.num_rows, blocks, kSelectThreads, room * static_cast<int>(sizeof(Entry)), launch, "row_filter", args,
          blocks, room, launch.reporter(args.report), launch.reporter("token_logprobs: token_ids"));
    });
  });
}

}  // namespace pykv
