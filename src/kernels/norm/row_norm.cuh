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
// Rows too wide for registers, or not made of whole aligned packs, are read once for each pass instead, by as many threads.
//
// The mapping follows from hidden_size alone, and who adds what in which order from the mapping: a row's result depends
// neither on the number of rows nor on their alignment, which only decide how a pack is fetched.
#pragma once
#include <algorithm>
#include <cinttypes>
#include <type_traits>
#include <utility>

#include "cuda/ahead.cuh"
#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/vec.cuh"
#include "norm/row_norm.h"
#include "norm/row_pairs.cuh"
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

// Whether rows to come are sent for.  Not where a thread has more to do with a row than to wait for it, as codes have, nor
// where little is written for what is read (static fp8 of 4096 x 8192 on an H200: 27.1 us with, 26.4 without).
template <class Source, class Result, int kThreads>
inline constexpr bool kSendsAhead =
    (kThreads > 32) && (sizeof(typename Result::Value) == kAccessBytes) && (Result::kLargest == Largest::kNothing) &&
    !kHasOwn<Result> && !kCodesAlone<Source, Result> && requires(const Source& source) { source.prefetch_row(0u); };

template <int kThreads>
inline constexpr int kBlockSize = kThreads > 32 ? kThreads : 128;

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
  static constexpr bool kMore = !kEarly && (kCentred || (kHasOwn<Result> && kPacks > 2));
  static constexpr int kRegisters = kRow + (kEarly && kPacks <= 2 ? 24
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

// Rows that stay in registers.  A thread has kPacks packs, those of kSplit threads as far as sums go.  kFull: all threads
// have so many, which spares the instructions that ask: of the 16 for each element of a quantised row 2.  Widths that are
// whole packs for each of these threads, but fewer, have kernels of their own: else those that are not there are registers
// and instructions all the same (per-token fp8 of 32768 x 5120 on an H200: 162 us, not 119).  (Where a gate is
// loaded beside the row it pays nothing, or costs 5 %.)
template <class Source, class Result, bool kCentred, int kThreads, int kPacks, int kSplit, bool kEarly, bool kFull>
__global__ __launch_bounds__(kBlockSize<kThreads>,
                             Held<Source, Result, kCentred, kPacks, kEarly, kFull>::blocks(kBlockSize<kThreads>))  //
    void row_norm_kernel(const __grid_constant__ typename Result::Args args, float inverse_size, uint32_t ahead) {
  using T = typename Source::Element;
  constexpr int kRows = kBlockSize<kThreads> / kThreads, kSize = kPackSize<T>;
  constexpr bool kAlone = kRows == 1 && Result::kLargest == Largest::kOfGroups;  // a block's row needs no asking
  const uint32_t row = kAlone ? blockIdx.x : blockIdx.x * kRows + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int hidden_size = static_cast<int>(args.hidden_size);
  const bool there = kAlone || row < args.num_rows;  // threads without a row stay: their warp reduces with all lanes
  const int packs = there ? packs_of<T>(hidden_size) : 0;
  Part part = Result::part_of(args, there ? row : 0);
  part.first += thread * kSize;
  const Source source(args, part);
  const auto has = [&](int k) { return kFull || thread + k * kThreads < packs; };
  if (comes_early(kEarlyBlocks<kBlockSize<kThreads> * kPacks>)) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (has(k)) {
        source.prefetch(k * kThreads);
        if (blockIdx.x == 0 || gridDim.x <= 256) Result::prefetch(args, part, k * kThreads);
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
    if (has(k)) raw[k] = source.load(k * kThreads);
  }
  Result result(args, part);
  result.have_ready();
  const auto load_beside = [&](int k) {
    if (has(k)) result.load(k * kThreads, beside[k]);
  };
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (kHasOwn<Result>) {
      if (has(k)) result.load_own(k * kThreads, beside[k]);  // into no zeros: the compiler would put the load off
    } else {
      beside[k] = {};
    }
    if constexpr (kEarly) load_beside(k);
  }

  const RowReducer<kThreads, kSplit> reducer;
  typename Source::Value z[kPacks];
  float centre = 0.0f, sums[kSplit] = {};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    z[k] = source.value(raw[k]);
    if (has(k)) source.keep(k * kThreads, z[k]);
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
    const int pack = has(k) ? k * kThreads : -thread;  // weights in float32 are loaded now: of a pack that is there
    y[k] = result.scaled(pack, normed<kCentred>(z[k], centre, r), beside[k]);
  };
  if constexpr (Result::kLargest == Largest::kNothing) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      scale(k);
      if (has(k)) result.store(k * kThreads, y[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) scale(k);
    if (args.int8) {
      store_by_largest<true, kThreads, kFull>(result, y, reducer, thread, packs);
    } else {
      store_by_largest<false, kThreads, kFull>(result, y, reducer, thread, packs);
    }
  }
}

// Rows that are read again for each pass: one block each.
template <class Source, class Result, bool kCentred>
__global__ __launch_bounds__(1024) void row_norm_again_kernel(const __grid_constant__ typename Result::Args args,
                                                              float inverse_size) {
  using T = typename Source::Element;
  const int thread = threadIdx.x, threads = blockDim.x;
  const int packs = packs_of<T>(static_cast<int>(args.hidden_size));
  const Part part = Result::part_of(args, blockIdx.x);
  begin_dependent();

  const Source source(args, part);
  Result result(args, part);
  const RowReducer<0> reducer;
  const auto value = [&](int pack) { return source.value(source.load(pack)); };
  float centres[1] = {}, sums[1] = {}, centre = 0.0f;
  if constexpr (kCentred) {
    for (int p = thread; p < packs; p += threads) centres[0] += sum_of(to_floats(value(p)));
    centre = mean_of(reducer.sum<0>(centres), static_cast<int>(args.hidden_size), inverse_size);
  }
#pragma unroll 2
  for (int p = thread; p < packs; p += threads)
    sums[0] += sum_of_squares<kCentred>(to_floats(value(p)), centre, source.input.count(p));
  const float r = rsqrtf(fmaf(reducer.sum<1>(sums), inverse_size, args.epsilon));

  // One pass over packs first, first + step, ... of a row or of a part of it.
  const auto each = [&](const Source& from, const Result& to, int first, int step, int end, auto use) {
    for (int p = first; p < end; p += step) {
      const auto z = from.value(from.load(p));
      typename Result::Raw beside;
      to.load(p, beside);
      if constexpr (kHasOwn<Result>) to.load_own(p, beside);
      use(p, z, to.scaled(p, normed<kCentred>(z, centre, r), beside));
    }
  };
  if constexpr (Result::kLargest == Largest::kNothing) {
    each(source, result, thread, threads, packs, [&](int p, const auto& z, const auto& y) {
      source.keep(p, z);
      result.store(p, y);
    });
  } else {
    const auto finish = [&]<bool kInt8>() {
      const auto largest = [&](const Source& from, const Result& to, int first, int step, int end) {
        float most = 0.0f;
        each(from, to, first, step, end, [&](int, const auto&, const auto& y) { most = fmaxf(most, largest_of(y)); });
        return most;
      };
      const auto store = [&](const Source& from, const Result& to, int first, int step, int end, float scale) {
        const typename Result::template Coder<kInt8> coder(scale);
        each(from, to, first, step, end, [&](int p, const auto& z, const auto& y) {
          from.keep(p, z);
          to.store(p, y, coder);
        });
      };
      if constexpr (Result::kLargest == Largest::kOfGroups) {
        const int size = result.group_size(), lane = thread % 32, group_packs = packs_of<T>(size);
        for (int group = thread / 32; group < part.size / size; group += threads / 32) {
          const Part within{part.row, part.first + group * size, size};
          const Source from(args, within);
          const Result to(args, within);
          const float scale =
              to.template scale_of<kInt8>(warp_reduce(largest(from, to, lane, 32, group_packs), 32, Maximum()));
          if (lane == 0) to.store_scale(group, scale);
          store(from, to, lane, 32, group_packs, scale);
        }
      } else {
        const float scale = result.template scale_of<kInt8>(
            reducer.template maximum<2>(largest(source, result, thread, threads, packs)));
        if (thread == 0) result.store_scale(0, scale);
        store(source, result, thread, threads, packs, scale);
      }
    };
    if (args.int8) {
      finish.template operator()<true>();
    } else {
      finish.template operator()<false>();
    }
  }
}

// Whether a group belongs to neighbouring lanes of one warp, in whole packs.
template <class T>
bool in_lanes(int64_t group_size) {
  const int64_t lanes = group_size / kPackSize<T>;
  return group_size % kPackSize<T> == 0 && lanes <= 32 && (lanes & (lanes - 1)) == 0;
}

// How rows of elements of `size` bytes lie that are moved in packs of `bytes`.  None: well.
inline Fit fit_of_rows(int64_t bytes, const void* data, const Rows& rows, int64_t size) {
  if (!data) return Fit::kPlain;
  if (!rows_aligned(bytes, data, rows, size)) return Fit::kAny;
  return rows.size1 == 1 && rows.size2 == 1 ? Fit::kPlain : Fit::kPacks;
}
template <class T>
Fit fit_of_weights(const RowWeights& weights) {
  if (!weights.data) return Fit::kPacks;
  if (!is_aligned(kAccessBytes, weights.data)) return Fit::kAny;
  return sizeof(T) < 4 && weights.is_float32 ? Fit::kPacks : Fit::kPlain;
}
// The least of the arrays of RowNormArgs, out having elements of out_size bytes, residual of residual_size.
template <class T>
Fit fit_of(const RowNormArgs& args, int64_t out_size, int64_t residual_size) {
  constexpr int64_t kSize = kPackSize<T>;
  if (args.hidden_size % kSize != 0) return Fit::kAny;
  return std::min({fit_of_rows(kAccessBytes, args.input, args.input_rows, sizeof(T)),
                   fit_of_rows(kSize * out_size, args.out, args.out_rows, out_size),
                   fit_of_rows(kAccessBytes, args.residual, args.residual_rows, residual_size),
                   fit_of_weights<T>(args.weights)});
}

// use<number>(), if that is one from kLeast to kMost.  Returns whether it is.
template <int kLeast, int kMost, class Use>
bool with_number(int number, const Use& use) {
  if (number == kMost) {
    use.template operator()<kMost>();
    return true;
  }
  if constexpr (kLeast < kMost) {
    return with_number<kLeast, kMost - 1>(number, use);
  } else {
    return false;
  }
}

// Launches a norm of arrays that lie as `fit` says.  kSplit: what a thread may stand for where there are many rows.  stays:
// they may be held in registers.
template <template <class, Fit> class Source, template <class, Fit> class Result, class T, int kSplit,
          bool kCentred = false>
void launch_row_norm(const typename Result<T, Fit::kAny>::Args& args, Fit fit, bool stays, const Launch& launch,
                     const char* op) {
  if (args.hidden_size > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^31 - 1 elements are not supported");
  if (args.num_rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
  const float inverse_size = 1.0f / static_cast<float>(args.hidden_size);
  const auto num_rows = static_cast<int>(args.num_rows);
  const int packs = packs_of<T>(static_cast<int>(args.hidden_size));
  const auto mapped = [&]<int kThreads, int kPacks>() {
    constexpr bool kFits = kPacks > 0 && kThreads * kPacks <= 2048 * (sizeof(T) == 4 ? 2 : 1);
    if constexpr (kFits) {
      if (fit != Fit::kAny && stays) {
        const auto launch_resident = [&]<Fit kFit>() {
          using S = Source<T, kFit>;
          using R = Result<T, kFit>;
          const auto launch_kernel = [&]<int kParts, int kNumber, bool kEarly, bool kFull>() {
            constexpr int kOwn = kThreads / kParts, kBlock = kBlockSize<kOwn>, kRows = kBlock / kOwn;
            launch_dependent(row_norm_kernel<S, R, kCentred, kOwn, kNumber, kParts, kEarly, kFull>,
                             (num_rows - 1) / kRows + 1, kBlock, launch, op, args, inverse_size,
                             rows_ahead(int64_t{packs} * sizeof(typename S::Raw)));
          };
          const auto start = [&]<int kParts, bool kEarly>() {
            constexpr int kOwn = kThreads / kParts, kOwnPacks = kPacks * kParts;
            if constexpr (kFit == Fit::kPlain && kOwn == kBlockSize<kOwn> && !kHasOwn<R>) {
              constexpr int kLeast = std::max(kOwnPacks / 2 + (kPacks > 2), kParts);
              const auto launch_full = [&]<int kNumber>() {
                launch_kernel.template operator()<kParts, kNumber, kEarly, true>();
              };
              if (packs % kOwn == 0 && with_number<kLeast, kOwnPacks>(packs / kOwn, launch_full)) return;
            }
            launch_kernel.template operator()<kParts, kOwnPacks, kEarly, false>();
          };
          // Few rows get all the threads there are, and nothing waits that can come at once.
          constexpr bool kEarly = kThreads <= 256;
          constexpr int kRoom = Held<S, R, kCentred, kPacks, kEarly, false>::blocks(kThreads);
          if constexpr (kPacks > 1 && (kSplit > 1 || kHasOwn<R> || kPacks > 2)) {
            constexpr bool kCodes = R::kLargest != Largest::kNothing;
            constexpr int kMost = kPacks == 2 ? 4 : kCodes && kThreads == 256 ? 2 : 1;
            if (num_rows > num_sms(launch.device) * kRoom / 2) {
              // Not of shorter rows, where it is better to have many small blocks (bf16 4096 x 4096: 14.9 us, in pairs 15.3).
              if constexpr (R::kLargest == Largest::kOfGroups && kFit == Fit::kPlain && kThreads == 256 &&
                            kPacks == 4) {
                if (packs == kThreads * kPacks && R::has_pairs(args)) {
                  constexpr int kBlocks = Held<S, R, kCentred, 2 * kPacks, false, true>::blocks(kThreads);
                  return launch_dependent(row_pairs_kernel<S, R, kThreads, kPacks, kBlocks>, (num_rows - 1) / 2 + 1,
                                          kThreads, launch, op, args, inverse_size);
                }
              }
              // Not eight packs for each thread: the last rows are done sooner (4096 x 4096 on an H200: 14.9 us, not 15.4).
              if constexpr (R::kLargest == Largest::kOfGroups && kFit == Fit::kPlain && kPacks == 2) {
                if (packs == kThreads * kPacks) return launch_kernel.template operator()<2, 4, false, true>();
              }
              return start.template operator()<std::min(kSplit, kMost), false>();
            }
          }
          start.template operator()<1, kEarly>();
        };
        return fit == Fit::kPlain ? launch_resident.template operator()<Fit::kPlain>()
                                  : launch_resident.template operator()<Fit::kPacks>();
      }
    }
    // as many threads: the order of addition is the same
    const uint32_t threads = kThreads < 32 ? 32 : kThreads;
    if (fit != Fit::kAny) {
      launch_dependent(row_norm_again_kernel<Source<T, Fit::kPacks>, Result<T, Fit::kPacks>, kCentred>, num_rows,
                       threads, launch, op, args, inverse_size);
    } else {
      launch_dependent(row_norm_again_kernel<Source<T, Fit::kAny>, Result<T, Fit::kAny>, kCentred>, num_rows, threads,
                       launch, op, args, inverse_size);
    }
  };
  if (packs <= 16) {
    mapped.template operator()<16, 1>();
  } else if (packs <= 32) {
    mapped.template operator()<32, 1>();
  } else if (packs <= 128) {
    mapped.template operator()<32, 4>();
  } else if (packs <= 512) {
    mapped.template operator()<256, 2>();
  } else if (packs <= 1024) {
    mapped.template operator()<256, 4>();
  } else if (packs <= 2048) {
    mapped.template operator()<512, 4>();
  } else if (packs <= 4096) {
    mapped.template operator()<1024, 4>();
  } else {
    mapped.template operator()<1024, 0>();
  }
}

}  // namespace
}  // namespace pykv
