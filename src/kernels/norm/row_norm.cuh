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
// Where a row costs many instructions or waits for several reductions, blocks take rows in turn and have the next one on
// its way meanwhile; weights are loaded once.  Where reading and writing is nearly all there is, a block for each row has
// more of them on an SM and lets the chip even them out (rms_norm of 65536 x 4096 on an H200: 256 us, in turn 272).  What
// a call begins with is fetched into the second-level cache under the tail of the kernel before it, so that a call too
// small to fill the chip hardly waits for memory (1 row of 4096: 1.1 us, not 1.5); such calls are always made in this way.
//
// Rows too wide for registers, or not made of whole aligned packs, are read once for each pass instead, by as many threads.
//
// The mapping follows from hidden_size alone, and who adds what in which order from the mapping: a row's result depends
// neither on the number of rows nor on their alignment, which only decide how a pack is fetched.
#pragma once
#include <algorithm>
#include <cinttypes>
#include <type_traits>

#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/pairs.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "norm/row_norm.h"
#include "norm/row_sources.cuh"

namespace pykv {
namespace {

// What a result has to know before it can store.
enum class Largest { kNothing, kOfRow, kOfGroups };

template <int kSize>
__device__ float sum_of(const Vec<float, kSize>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum += v[i];
  return sum;
}
// Of the distances from `centre`, over the first `count` elements.
template <bool kCentred, int kSize>
__device__ float sum_of_squares(const Vec<float, kSize>& v, float centre, int count) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float x = kCentred ? (i < count ? v[i] - centre : 0.0f) : v[i];
    sum = fmaf(x, x, sum);
  }
  return sum;
}
// The largest magnitude, NaN being passed over.  As it is found: of 16-bit numbers two, signs meaning nothing.
template <class T, int kSize>
__device__ auto largest_parts(const Vec<T, kSize>& v) {
  if constexpr (kInWords<T, kSize>) {
    uint32_t most = v.words[0];
#pragma unroll
    for (int i = 1; i < kSize / 2; ++i) most = larger_magnitudes<T>(most, v.words[i]);
    return most;
  } else {
    const auto floats = to_floats(v);
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) most = fmaxf(most, fabsf(floats[i]));
    return most;
  }
}
template <class T, int kSize>
__device__ float largest_of(const Vec<T, kSize>& v) {
  if constexpr (kInWords<T, kSize>) {
    const float2 pair = word_to_floats<T>(largest_parts(v) & 0x7fff7fffu);
    return fmaxf(fmaxf(pair.x, pair.y), 0.0f);
  } else {
    return largest_parts(v);
  }
}

// The largest of each of kCount packs over `lanes` neighbouring lanes.
template <class T, int kSize, int kCount>
__device__ void largest_of_lanes(const Vec<T, kSize> (&v)[kCount], int lanes, float (&mosts)[kCount]) {
  if constexpr (kInWords<T, kSize> && kCount % 2 == 0) {
    uint32_t pairs[kCount / 2];  // of two packs each
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      const uint32_t a = largest_parts(v[2 * k]), b = largest_parts(v[2 * k + 1]);
      pairs[k] = larger_magnitudes<T>(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (uint32_t& pair : pairs) pair = larger_magnitudes<T>(pair, __shfl_xor_sync(0xffffffffu, pair, distance));
    }
#pragma unroll
    for (int k = 0; k < kCount / 2; ++k) {
      const float2 floats = word_to_floats<T>(pairs[k] & 0x7fff7fffu);
      mosts[2 * k] = fmaxf(floats.x, 0.0f);  // NaN where there is nothing else
      mosts[2 * k + 1] = fmaxf(floats.y, 0.0f);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) mosts[k] = warp_reduce(largest_of(v[k]), lanes, Maximum());
  }
}

// (v - centre) * r.
template <bool kCentred, class T, int kSize>
__device__ Vec<float, kSize> normed(const Vec<T, kSize>& v, float centre, float r) {
  auto floats = to_floats(v);
#pragma unroll
  for (int i = 0; i < kSize; ++i) floats[i] = (kCentred ? floats[i] - centre : floats[i]) * r;
  return floats;
}

// Over the threads of a row: kThreads, or the whole block (0).  Each use in a turn has a number of its own.
template <int kThreads>
class RowReducer {
 public:
  __device__ RowReducer() : block_(kThreads ? kThreads / 32 : static_cast<int>(blockDim.x) / 32) {}
  template <int kUse, class Combine>
  __device__ float reduce(float v, Combine combine) const {
    return block_.reduce<kUse>(v, combine);
  }
  __device__ void next_turn() { block_.next_turn(); }

 private:
  BlockReducer block_;
};
template <int kThreads>
  requires(kThreads > 0 && kThreads <= 32)
class RowReducer<kThreads> {
 public:
  template <int kUse, class Combine>
  __device__ float reduce(float v, Combine combine) const {
    return warp_reduce(v, kThreads, combine);
  }
  __device__ void next_turn() {}
};

template <class T>
__host__ __device__ int packs_of(int hidden_size) {
  return (hidden_size - 1) / kPackSize<T> + 1;
}

// The mean of a row with this sum.  The second step makes it what a division would give, so that equal elements are
// their own mean: what is left of them would be multiplied by 1 / sqrt(epsilon).
__device__ inline float mean_of(float sum, int hidden_size, float inverse_size) {
  const float mean = sum * inverse_size;
  return fmaf(fmaf(-mean, static_cast<float>(hidden_size), sum), inverse_size, mean);
}

template <int kThreads>
inline constexpr int kBlockSize = kThreads > 128 ? kThreads : 128;

// Rows that stay in registers, in turn: a block takes every gridDim.x-th set of kRows.
template <class Source, class Result, int kThreads, int kPacks>
struct Mapping {
  static constexpr int kBlock = kBlockSize<kThreads>, kRows = kBlock / kThreads;
  // 32-bit registers of a thread: for what it has of two rows and beside them, and for the rest.
  static constexpr int kHeld =
      kPacks *
      static_cast<int>(sizeof(typename Source::Raw) + sizeof(typename Source::Value) + sizeof(typename Result::Raw)) /
      4;
  static constexpr int kRest = kThreads == 32 ? 48 : 38;  // more where the row is not that of the block
  static constexpr int kBlocksOfSm = std::max(1, std::min(2048, 65536 / (kHeld + kRest)) / kBlock);
};

template <class Source, class Result, bool kCentred, int kThreads, int kPacks>
__global__ __launch_bounds__(Mapping<Source, Result, kThreads, kPacks>::kBlock,
                             Mapping<Source, Result, kThreads, kPacks>::kBlocksOfSm)  //
    void row_norm_in_turn_kernel(const __grid_constant__ typename Result::Args args, float inverse_size) {
  using T = typename Source::Element;
  using Raw = typename Source::Raw;
  constexpr int kRows = Mapping<Source, Result, kThreads, kPacks>::kRows, kSize = kPackSize<T>;
  const int thread = threadIdx.x % kThreads;
  const int hidden_size = static_cast<int>(args.hidden_size);
  const auto num_rows = static_cast<uint32_t>(args.num_rows);
  const uint32_t step = gridDim.x * kRows;
  uint32_t first = blockIdx.x * kRows;
  bool has[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) has[k] = thread + k * kThreads < packs_of<T>(hidden_size);
  // The row of these threads, from the thread's first pack on.  Threads without a row stay: their warp reduces with all
  // lanes.  They get the last one, which they do not store.
  const auto part_of = [&](uint32_t first) {
    const uint32_t row = first + threadIdx.x / kThreads;
    Part part = Result::part_of(args, kRows == 1 ? row : min(row, num_rows - 1));
    part.first += thread * kSize;
    return part;
  };
  {
    const Part part = part_of(first);
    const Source source(args, part);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (has[k]) {
        source.prefetch(k * kThreads);
        Result::prefetch(args, part, k * kThreads);
      }
    }
  }
  begin_dependent();

  Raw raw[kPacks];
  const auto load = [&](uint32_t first) {
    const Source source(args, part_of(first));
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      raw[k] = {};
      if (has[k]) raw[k] = source.load(k * kThreads);
    }
  };
  load(first);

  constexpr bool kEarly = kThreads <= 256 && sizeof(typename Result::Raw) * kPacks <= 128;
  Result result(args, part_of(first));
  typename Result::Raw beside[kPacks];
  const auto load_beside = [&](int k) {
    beside[k] = {};
    if (has[k]) beside[k] = result.load(k * kThreads);
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) load_beside(k);
  }

  RowReducer<kThreads> reducer;
  while (true) {
    const bool there = kRows == 1 || first + threadIdx.x / kThreads < num_rows;
    typename Source::Value z[kPacks];
    float centre = 0.0f, sum = 0.0f;
    const Source source(args, part_of(first));
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      z[k] = source.value(raw[k]);
      if (has[k] && there) source.keep(k * kThreads, z[k]);
    }
    const bool more = first + step < num_rows;
    if (more) load(first + step);

#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (kCentred) {
        centre += sum_of(to_floats(z[k]));
      } else {
        sum += sum_of_squares<false>(to_floats(z[k]), 0.0f, 0);
      }
    }
    if constexpr (kCentred) {
      centre = mean_of(reducer.template reduce<0>(centre, Sum()), hidden_size, inverse_size);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const float of_pack = sum_of_squares<true>(to_floats(z[k]), centre, kSize);
        sum += has[k] ? of_pack : 0.0f;
      }
    }
    const float r = rsqrtf(fmaf(reducer.template reduce<1>(sum, Sum()), inverse_size, args.epsilon));

    typename Result::Value y[kPacks];
    const auto scale = [&](int k) {
      if constexpr (!kEarly) load_beside(k);
      y[k] = result.scaled(k * kThreads, normed<kCentred>(z[k], centre, r), beside[k]);
    };
    const auto store = [&](int k, const Result& result) {
      if (has[k] && there) result.store(k * kThreads, y[k]);
    };
    if constexpr (Result::kLargest != Largest::kNothing) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) scale(k);
    }
    if constexpr (Result::kLargest == Largest::kOfRow) {
      float most = 0.0f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) most = fmaxf(most, has[k] ? largest_of(y[k]) : 0.0f);
      result.scale_by(reducer.template reduce<2>(most, Maximum()));
      if (there && thread == 0) result.store_scale(0);
    }
    if constexpr (Result::kLargest == Largest::kOfGroups) {
      // Each lane makes one of the scales that the lanes of its group need, those of kPacks groups.
      const int lanes = result.group_size() / kSize;  // a power of two: see in_lanes
      const int shift = __ffs(lanes) - 1, own = thread % kPacks;
      float mosts[kPacks], most = 0.0f;
      largest_of_lanes(y, lanes, mosts);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) most = own == k ? mosts[k] : most;
      if (lanes >= kPacks) result.scale_by(most);
      if (lanes >= kPacks && __all_sync(0xffffffffu, result.is_plain())) {
        const int pack = thread + own * kThreads;
        if (there && pack * kSize < hidden_size && (thread & (lanes - 1)) < kPacks) result.store_scale(pack >> shift);
#pragma unroll
        for (int k = 0; k < kPacks; ++k) store(k, result.of_lane((threadIdx.x & -lanes) + k));
      } else {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          result.scale_by(mosts[k]);
          if (there && has[k] && (thread & (lanes - 1)) == 0) result.store_scale((thread + k * kThreads) >> shift);
          store(k, result);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if constexpr (Result::kLargest == Largest::kNothing) scale(k);
        store(k, result);
      }
    }
    if (!more) break;
    first += step;
    result.move_to(args, part_of(first));
    reducer.next_turn();
  }
}

// Rows that stay in registers, a set of kRows for each block.
template <class Source, class Result, bool kCentred, int kThreads, int kPacks>
__global__ __launch_bounds__(kBlockSize<kThreads>) void row_norm_kernel(const __grid_constant__
                                                                        typename Result::Args args,
                                                                        float inverse_size) {
  using T = typename Source::Element;
  static_assert(!kCentred && Result::kLargest == Largest::kNothing);
  constexpr int kRows = kBlockSize<kThreads> / kThreads;
  const uint32_t row = blockIdx.x * kRows + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int hidden_size = static_cast<int>(args.hidden_size);
  const bool there = row < args.num_rows;  // threads without a row stay: their warp reduces with all lanes
  const int packs = there ? packs_of<T>(hidden_size) : 0;
  const Part part = Result::part_of(args, there ? row : 0);
  begin_dependent();

  const Source source(args, part);
  const Result result(args, part);
  constexpr bool kEarly = kThreads <= 256;
  typename Source::Raw raw[kPacks];
  typename Result::Raw beside[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    raw[k] = {};
    if (thread + k * kThreads < packs) raw[k] = source.load(thread + k * kThreads);
  }
  const auto load_beside = [&](int k) {
    beside[k] = {};
    if (thread + k * kThreads < packs) beside[k] = result.load(thread + k * kThreads);
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) load_beside(k);
  }

  const RowReducer<kThreads> reducer;
  typename Source::Value z[kPacks];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    z[k] = source.value(raw[k]);
    if (thread + k * kThreads < packs) source.keep(thread + k * kThreads, z[k]);
    sum += sum_of_squares<false>(to_floats(z[k]), 0.0f, 0);
  }
  const float r = rsqrtf(fmaf(reducer.template reduce<1>(sum, Sum()), inverse_size, args.epsilon));
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (!kEarly) load_beside(k);
    const int pack = thread + k * kThreads;
    if (pack < packs) result.store(pack, result.scaled(pack, normed<false>(z[k], 0.0f, r), beside[k]));
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
  float centre = 0.0f, sum = 0.0f;
  if constexpr (kCentred) {
    for (int p = thread; p < packs; p += threads) centre += sum_of(to_floats(value(p)));
    centre = mean_of(reducer.reduce<0>(centre, Sum()), static_cast<int>(args.hidden_size), inverse_size);
  }
#pragma unroll 2
  for (int p = thread; p < packs; p += threads)
    sum += sum_of_squares<kCentred>(to_floats(value(p)), centre, source.input.count(p));
  const float r = rsqrtf(fmaf(reducer.reduce<1>(sum, Sum()), inverse_size, args.epsilon));

  // One pass over packs first, first + step, ... of a row or of a part of it.
  const auto largest = [&](const Source& from, const Result& to, int first, int step, int end) {
    float most = 0.0f;
    for (int p = first; p < end; p += step)
      most = fmaxf(most, largest_of(to.scaled(p, normed<kCentred>(from.value(from.load(p)), centre, r), to.load(p))));
    return most;
  };
  const auto store = [&](const Source& from, const Result& to, int first, int step, int end) {
    for (int p = first; p < end; p += step) {
      const auto z = from.value(from.load(p));
      from.keep(p, z);
      to.store(p, to.scaled(p, normed<kCentred>(z, centre, r), to.load(p)));
    }
  };
  if constexpr (Result::kLargest == Largest::kOfGroups) {
    const int size = result.group_size(), lane = thread % 32, group_packs = packs_of<T>(size);
    for (int group = thread / 32; group < part.size / size; group += threads / 32) {
      const Part within{part.row, part.first + group * size, size};
      const Source from(args, within);
      Result to(args, within);
      to.scale_by(warp_reduce(largest(from, to, lane, 32, group_packs), 32, Maximum()));
      if (lane == 0) to.store_scale(group);
      store(from, to, lane, 32, group_packs);
    }
  } else {
    if constexpr (Result::kLargest == Largest::kOfRow) {
      result.scale_by(reducer.reduce<2>(largest(source, result, thread, threads, packs), Maximum()));
      if (thread == 0) result.store_scale(0);
    }
    store(source, result, thread, threads, packs);
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

// Launches a norm of arrays that lie as `fit` says.  kInTurn: rows are worth taking in turn.  stays: they may be held in
// registers.
template <template <class, Fit> class Source, template <class, Fit> class Result, class T, bool kInTurn,
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
          using M = Mapping<Source<T, kFit>, Result<T, kFit>, kThreads, kPacks>;
          const int sets = (num_rows - 1) / M::kRows + 1, room = num_sms(launch.device) * M::kBlocksOfSm;
          if constexpr (!kInTurn) {
            if (sets > room)
              return launch_dependent(row_norm_kernel<Source<T, kFit>, Result<T, kFit>, kCentred, kThreads, kPacks>,
                                      sets, M::kBlock, launch, op, args, inverse_size);
          }
          // Very many rows: a few turns each, for the same reason that others get blocks of their own.
          const bool few = M::kBlocksOfSm > 2 && sets / 16 > room;
          const int grid = few ? (sets - 1) / 8 + 1 : std::min(sets, room);
          launch_dependent(row_norm_in_turn_kernel<Source<T, kFit>, Result<T, kFit>, kCentred, kThreads, kPacks>, grid,
                           M::kBlock, launch, op, args, inverse_size);
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
  constexpr bool kGroups = Result<T, Fit::kAny>::kLargest == Largest::kOfGroups;  // scales cost less for more elements
  if (packs <= 16) {
    mapped.template operator()<16, 1>();
  } else if (packs <= 32) {
    mapped.template operator()<32, 1>();
  } else if (packs <= 128) {
    mapped.template operator()<32, 4>();
  } else if (packs <= 512) {
    mapped.template operator()<kGroups ? 128 : 256, kGroups ? 4 : 2>();
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
