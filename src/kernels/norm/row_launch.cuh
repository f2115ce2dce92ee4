// Which kernel a norm takes: row_norm.cuh's for rows that registers hold, row_norm_again.cuh's for others.
//
// Each norm has a few kernels of row_norm.cuh that take whatever lies in whole aligned packs: rows of several dimensions,
// weights in float32 or none, any width.  What models do most has exact ones beside these, for the widths kExactPacks
// alone: all sizes are known there, and nothing is asked (2 of the 16 instructions for each element of a quantised row).
#pragma once
#include <algorithm>
#include <cinttypes>

#include "norm/row_norm.cuh"
#include "norm/row_norm_again.cuh"
#include "norm/row_pairs.cuh"

namespace pykv {
namespace {

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
  const bool wide = weights.is_float32;
  if (!is_aligned(kAccessBytes, weights.data) || weights.stride * (wide ? 4 : sizeof(T)) % kAccessBytes != 0)
    return Fit::kAny;
  if (weights.stride != 0) return Fit::kPacks;
  return sizeof(T) < 4 && wide ? Fit::kPacks : Fit::kPlain;
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

// What all launches of a norm have.
template <class Args>
struct RowLaunch {
  const Args& args;
  const Launch& launch;
  const char* op;
  int num_rows = static_cast<int>(args.num_rows);
  float inverse_size = 1.0f / static_cast<float>(args.hidden_size);

  template <class... Parameters>
  void operator()(void (*kernel)(Parameters...), int rows_of_block, int threads, auto... more) const {
    launch_dependent(kernel, (num_rows - 1) / rows_of_block + 1, threads, launch, op, args, inverse_size, more...);
  }
  // Whether blocks of kThreads threads fill half the GPU.  Fewer rows get all the threads there are, and nothing waits
  // that can come at once.
  template <class Source, class Result, bool kCentred, int kThreads, int kPacks>
  bool fills_gpu() const {
    return num_rows >
           num_sms(launch.device) * Held<Source, Result, kCentred, kPacks, true, false>::blocks(kThreads) / 2;
  }
};

// The mapping, in packs of a row: up to 16 and 32 by as many lanes, to 128 by 32 lanes, to 1024 by 256 threads, to 2048 and
// in kernels that read again by 512, beyond by 1024.  Sums of a row of 129 to 512 packs are those of 256 threads whoever
// adds them (kSplit).
constexpr int kMostResidentPacks = 2048;
inline int threads_of(int packs) { return packs <= 128 ? 32 : packs <= 1024 ? 256 : packs <= 2048 ? 512 : 1024; }

// Rows of 512 and of 1024 packs that lie plainly (hidden sizes of 4096 and 8192 in 16 bits) by kernels that take nothing
// else.  kSplit: what a thread may stand for where there are many rows.  Returns whether they are such rows.
template <template <class, Fit> class Source, template <class, Fit> class Result, class T, int kSplit,
          bool kCentred = false>
bool launch_exact(const typename Result<T, Fit::kPacks>::Args& args, Fit fit, const Launch& launch, const char* op) {
  if constexpr (sizeof(T) == 2) {
    using S = Source<T, Fit::kPlain>;
    using R = Result<T, Fit::kPlain>;
    constexpr bool kFull = !kHasOwn<R>, kGroups = R::kLargest == Largest::kOfGroups;
    const int64_t packs = args.hidden_size / kPackSize<T>;
    if (fit != Fit::kPlain || (packs != 512 && packs != 1024)) return false;
    const RowLaunch<typename R::Args> start{args, launch, op};
    const uint32_t ahead = rows_ahead(packs * int64_t{sizeof(typename S::Raw)});
    const auto start_with = [&]<int kThreads, int kPacks, int kParts, bool kEarly>() {
      start(row_norm_kernel<S, R, kCentred, kThreads, kPacks, kParts, kEarly, kFull>, 1, kThreads, ahead);
    };
    if (packs == 512) {
      if (!start.template fills_gpu<S, R, kCentred, 256, 2>()) {
        start_with.template operator()<256, 2, 1, true>();
      } else if constexpr (kSplit == 1) {
        start_with.template operator()<256, 2, 1, false>();
      } else {
        // Groups, too, by no more packs for each thread: the last rows are done sooner (4096 x 4096 on an H200: 14.9 us,
        // by eight 15.4).
        start_with.template operator()<128, 4, 2, false>();
      }
    } else if (!start.template fills_gpu<S, R, kCentred, 256, 4>()) {
      start_with.template operator()<256, 4, 1, true>();
    } else if constexpr (R::kLargest == Largest::kNothing) {
      start_with.template operator()<256, 4, 1, false>();
    } else {
      // Not of shorter rows, where it is better to have many small blocks (bf16 4096 x 4096: 14.9 us, in pairs 15.3).
      if constexpr (kGroups) {
        if (R::has_pairs(args)) {
          constexpr int kBlocks = Held<S, R, kCentred, 8, false, true>::blocks(256);
          start(row_pairs_kernel<S, R, 256, 4, kBlocks>, 2, 256);
          return true;
        }
      }
      start_with.template operator()<128, 8, 2, false>();
    }
    return true;
  } else {
    return false;
  }
}

// Launches a norm of arrays that lie as `fit` says.  stays: rows may be held in registers.  Seldom: the source of kernels
// that matter little, which may be one for several calls.
template <template <class, Fit> class Source, template <class, Fit> class Result, class T, int kSplit,
          bool kCentred = false, template <class, Fit> class Seldom = Source>
void launch_row_norm(const typename Result<T, Fit::kAny>::Args& args, Fit fit, bool stays, const Launch& launch,
                     const char* op) {
  if (args.hidden_size > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^31 - 1 elements are not supported");
  if (args.num_rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
  using S = Source<T, Fit::kPacks>;
  using R = Result<T, Fit::kPacks>;
  const int packs = packs_of<T>(static_cast<int>(args.hidden_size)), threads = threads_of(packs);
  const RowLaunch<typename R::Args> start{args, launch, op};
  if (fit == Fit::kAny || !stays || packs > kMostResidentPacks) {
    start(row_norm_again_kernel<Seldom<T, Fit::kAny>, Result<T, Fit::kAny>, kCentred>, 1, threads);
    return;
  }
  const uint32_t ahead = rows_ahead(packs * int64_t{sizeof(typename S::Raw)});
  constexpr bool kSmall = sizeof(T) == 2;  // 16-bit elements have kernels for narrow rows
  if constexpr (kSmall && R::kLargest == Largest::kNothing) {
    if (packs <= 32) {
      const int lanes = lanes_of(packs);
      return start(row_norm_kernel<S, R, kCentred, kLanes, 1, 1, true, false>, 128 / lanes, 128, ahead);
    }
  }
  if (packs <= 128)
    return start(row_norm_kernel<Seldom<T, Fit::kPacks>, R, kCentred, 32, 4, 1, true, false>, 4, 128, ahead);
  if constexpr (kSmall) {
    if (packs <= 512) {
      if constexpr (kSplit == 1) {
        return start(row_norm_kernel<S, R, kCentred, 256, 2, 1, true, false>, 1, 256, ahead);
      } else {
        return start(row_norm_kernel<S, R, kCentred, 128, 4, 2, false, false>, 1, 128, ahead);
      }
    }
  }
  start(row_norm_kernel<S, R, kCentred, kWholeBlock, 4, 1, false, false>, 1, threads, ahead);
}

}  // namespace
}  // namespace pykv
