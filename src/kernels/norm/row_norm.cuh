// The row reduction behind all norms: rows of an array, a statistic of each, and what becomes of its elements.
//
// A norm is made of three parts.  A source says what is normed: loaded (raw), made a value that stays with the thread, and
// kept where it has to be (a residual).  The statistic is r = 1 / sqrt(mean square + epsilon), of the value itself or of
// its distance from the row's mean.  A result takes the normed value, in fp32, with what belongs to it (weights), and
// stores it; some need the largest magnitude of the row, or of groups within it, before they can.
//
// Memory-bound.  The floor is each byte moved once, so a row stays in registers until it is stored.  A row belongs to
// kThreads threads (part of a warp up to a whole block) as packs of 16 bytes of the input, kPacks a thread, all loaded
// before the first is used, together with the weight (while registers last).
//
// Where there are rows enough, each takes fewer threads with more packs, since what a thread does once (addresses, sums,
// scales) costs as much as its elements: they add in the order in which as many as before would.  Weights come late then,
// so that reading them, all blocks the same, delays no row (dynamic fp8 of 512 x 4096 on an H200: 5.2 -> 3.2 us), and rows
// to come are sent for (cuda/ahead.cuh).  What the first blocks begin with is fetched into the second-level cache under the
// tail of the kernel before, so that a call too small to fill the chip hardly waits for memory.
//
// Rows too wide for registers, or not made of whole aligned packs, are read once for each pass instead, by as many threads:
// row_norm_again.cuh.  row_launch.cuh chooses.
//
// The mapping follows from hidden_size alone, and who adds what in which order from the mapping: a row's result depends
// neither on the number of rows nor on their alignment, which only decide how a pack is fetched.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/ahead.cuh"
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "norm/row_sources.cuh"
#include "norm/row_sums.cuh"
#include "norm/store_by_largest.cuh"

namespace pykv {
namespace {

template <class T>
__host__ __device__ int packs_of(int hidden_size) {
  return (hidden_size - 1) / kPackSize<T> + 1;
}

// Whether part of what a result takes beside the row belongs to that row alone, and so comes from memory: a gate.
template <class Result>
inline constexpr bool kHasOwn = requires(const Result& result, Result::Raw& raw) { result.load_own(0, raw); };

// Whether a row becomes codes and nothing else: half the bytes that were read, or less.
template <class Source, class Result>
inline constexpr bool kCodesAlone = sizeof(typename Source::Raw) == kAccessBytes &&
                                    sizeof(*std::declval<Result&>().out.data) < sizeof(typename Source::Element);

// Threads of a row that follow from hidden_size at run time: a block of at most 512, or 16 or 32 lanes of one of 128.
inline constexpr int kWholeBlock = 0, kLanes = -1;

template <int kThreads>
inline constexpr int kBlockSize = kThreads == kWholeBlock ? 512
                                  : kThreads > 32         ? kThreads
                                                          : 128;

// How many lanes a row of so many packs has under kLanes.
__host__ __device__ inline int lanes_of(int packs) { return packs > 16 ? 32 : 16; }

// Whether rows to come are sent for.  Not where a thread has more to do with a row than to wait for it, as codes have, nor
// where little is written for what is read (static fp8 of 4096 x 8192 on an H200: 27.1 us with, 26.4 without).
template <class Source, class Result, int kThreads>
inline constexpr bool kSendsAhead =
    (kThreads == kWholeBlock || kThreads > 32) && (sizeof(typename Result::Value) == kAccessBytes) &&
    (Result::kLargest == Largest::kNothing) && !kHasOwn<Result> && !kCodesAlone<Source, Result> &&
    requires(const Source& source) { source.prefetch_row(0u); };

// What a thread of row_norm_kernel holds.  kEarly: what belongs to all rows (weights) while it waits for the row.
template <class Source, class Result, bool kCentred, int kPacks, bool kEarly, bool kFull>
struct Held {
  // 32-bit registers, and others beside these: more where the row is passed over once more, or packs may be missing.
  static constexpr int kRow = kPacks *
                              static_cast<int>(std::max(sizeof(typename Source::Raw), sizeof(typename Source::Value)) +
                                               (kEarly            ? sizeof(typename Result::Raw)
                                                : kHasOwn<Result> ? sizeof(Pack<typename Source::Element>)
                                                                  : 0)) /
                              4;
  // weights in float32 beside a gate
  static constexpr int kWide = kHasOwn<Result> && kFitOf<Result> != Fit::kPlain ? 8 : 0;
  static constexpr bool kMore = !kEarly && (kCentred || (kHasOwn<Result> && kPacks > 2));
  static constexpr int kRegisters = kRow + kWide +
                                    (kEarly && kPacks <= 2 ? 24
                                     : kPacks > 4          ? (kFull ? 48 : 56)
                                     : kMore               ? 48
                                                           : 32);
  static constexpr int blocks(int size) {
    const int warps = std::min(16, 512 / ((kRegisters + 7) / 8 * 8));  // of a quarter of an SM, which has 512 a lane
    return std::max(1, 4 * warps * 32 / size);
  }
};

// Blocks of so many packs whose rows are fetched before the wait.  4 MiB or somewhat more: what comes besides delays the last
// rows of the kernel before (per-token fp8 of 4096 x 4096 on an H200: 512 blocks of 8 KiB 14.6 us, 1024 14.9, 2048 15.0,
// 256 14.8, none 16.0).
template <int kBlockPacks>
inline constexpr uint32_t kEarlyBlocks = kBlockPacks < 512 ? 1024 : 512;

// The compiler would keep the floats that sums are made of, for which codes of rows leave no registers.
template <class T, int kSize>
__device__ void convert_anew(Vec<T, kSize>& v) {
  if constexpr (kInWords<T, kSize>) {
#pragma unroll
    for (uint32_t& word : v.words) have_ready(word);
  }
}

// Rows that stay in registers.  A thread has kPacks packs, those of kSplit threads as far as sums go.  kFull: all threads
// have so many, which spares the instructions that ask: of the 16 for each element of a quantised row 2.  (Where a gate is
// loaded beside the row it pays nothing, or costs 5 %.)
template <class Source, class Result, bool kCentred, int kThreads, int kPacks, int kSplit, bool kEarly, bool kFull>
__global__ __launch_bounds__(kBlockSize<kThreads>,
                             Held<Source, Result, kCentred, kPacks, kEarly, kFull>::blocks(kBlockSize<kThreads>))  //
    void row_norm_kernel(const __grid_constant__ typename Result::Args args, float inverse_size, uint32_t ahead) {
  using T = typename Source::Element;
  constexpr int kSize = kPackSize<T>;
  constexpr bool kWhole = kThreads == kWholeBlock || kThreads == kBlockSize<kThreads>;  // one row to a block
  constexpr bool kAlone = kWhole && Result::kLargest == Largest::kOfGroups;             // which needs no asking
  const int hidden_size = static_cast<int>(args.hidden_size);
  const int threads = kThreads > 0              ? kThreads
                      : kThreads == kWholeBlock ? static_cast<int>(blockDim.x)
                                                : lanes_of(packs_of<T>(hidden_size));
  const uint32_t row = kWhole ? blockIdx.x : blockIdx.x * (kBlockSize<kThreads> / threads) + threadIdx.x / threads;
  const int thread = kWhole ? threadIdx.x : threadIdx.x % threads;
  const bool there = kAlone || row < args.num_rows;  // threads without a row stay: their warp reduces with all lanes
  const int packs = there ? packs_of<T>(hidden_size) : 0;
  Part part = Result::part_of(args, there ? row : 0);
  part.first += thread * kSize;
  const Source source(args, part);
  const auto has = [&](int k) { return kFull || thread + k * threads < packs; };
  // Packs that no thread has.  (Gates are loaded without asking.)
  const auto skips = [&](int k) { return !kFull && !kHasOwn<Result> && k > 0 && k * threads >= packs; };
  if (comes_early(kEarlyBlocks<kBlockSize<kThreads> * kPacks>)) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (has(k)) {
        source.prefetch(k * threads);
        if (blockIdx.x == 0 || gridDim.x <= 256) Result::prefetch(args, part, k * threads);
      }
    }
  }
  begin_dependent();
  if constexpr (kSendsAhead<Source, Result, kThreads> && !kEarly) {
    if (thread == 0 && row + ahead < args.num_rows)
      Source(args, Result::part_of(args, row + ahead)).prefetch_row(packs * kSize);
  }

  typename Source::Raw raw[kPacks];
  typename Result::Raw beside[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    raw[k] = {};
    if (has(k)) raw[k] = source.load(k * threads);
  }
  Result result(args, part);
  result.have_ready();
  const auto load_beside = [&](int k) {
    if (has(k)) result.load(k * threads, beside[k]);
  };
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (kHasOwn<Result>) {
      if (has(k)) result.load_own(k * threads, beside[k]);  // into no zeros: the compiler would put the load off
    } else {
      beside[k] = {};
    }
    if constexpr (kEarly) load_beside(k);
  }

  const RowReducer<kThreads, kSplit> reducer(threads);
  typename Source::Value z[kPacks];
  float centre = 0.0f, sums[kSplit] = {};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    z[k] = source.value(raw[k]);
    if (skips(k)) continue;
    if (has(k)) source.keep(k * threads, z[k]);
    if constexpr (kCentred) {
      sums[k % kSplit] += sum_of(to_floats(z[k]));
    } else {
      sums[k % kSplit] += sum_of_squares<false>(to_floats(z[k]), 0.0f, 0);
    }
  }
  if constexpr (kCentred) {
    centre = mean_of(reducer.template sum<0>(sums), hidden_size, inverse_size);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const float of_pack = sum_of_squares<true>(to_floats(z[k]), centre, kSize);
      sums[k % kSplit] = (k < kSplit ? 0.0f : sums[k % kSplit]) + (has(k) ? of_pack : 0.0f);
    }
  }
  const float r = rsqrtf(fmaf(reducer.template sum<1>(sums), inverse_size, args.epsilon));
  typename Result::Value y[kPacks];
  const auto scale = [&](int k) {
    if constexpr (!kEarly) load_beside(k);
    const int pack = has(k) ? k * threads : -thread;  // weights in float32 are loaded now: of a pack that is there
    if constexpr (Result::kLargest == Largest::kOfRow) convert_anew(z[k]);
    y[k] = result.scaled(pack, normed<kCentred>(z[k], centre, r), beside[k]);
  };
  if constexpr (Result::kLargest == Largest::kNothing) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (skips(k)) continue;
      scale(k);
      if (has(k)) result.store(k * threads, y[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (skips(k)) {
        y[k] = {};
      } else {
        scale(k);
      }
    }
    if constexpr (Result::kLargest == Largest::kOfGroups) {
      store_by_largest_of_groups<kFull>(result, y, thread, threads, packs);
    } else if (args.int8) {
      store_by_largest_of_row<true, kFull>(result, y, reducer, thread, threads, packs);
    } else {
      store_by_largest_of_row<false, kFull>(result, y, reducer, thread, threads, packs);
    }
  }
}

}  // namespace
}  // namespace pykv
