// The row reduction behind all norms: rows of an array, a statistic of each, and what becomes of its elements.
//
// A norm is made of three parts.  A source says what is normed: loaded (raw), made a value that stays with the thread, and
// kept where it has to be (a residual).  The statistic is r = 1 / sqrt(mean square + epsilon), of the value itself or of
// its distance from the row's mean.  A result takes the normed value, in fp32, with what belongs to it (weights), and
// stores it; some need the largest magnitude of the row, or of groups within it, before they can.
//
// Memory-bound.  The floor is each byte moved once, so a row stays in registers until it is stored.  A row belongs to
// kThreads threads (part of a warp up to a whole block) as packs of 16 bytes of the input, kPacks a thread, all loaded
// before the first is used, together with the weight (while registers last): a call that is too small to fill the chip
// waits for memory once, and comes up under the tail of the kernel before it.  Rows too wide for registers, or not made of
// whole aligned packs, are read once for each pass instead (kPacks = 0), by as many threads.
//
// The mapping follows from hidden_size alone, and who adds what in which order from the mapping: a row's result depends
// neither on the number of rows nor on their alignment, which only decides how a pack is fetched.
#pragma once

#include <cinttypes>
#include <type_traits>

#include "cuda/dependent.cuh"
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "norm/row_norm.h"

namespace pykv {
namespace {

// Packs of kSize elements of a row, or of a part of one.  Unaligned, or with a last pack that is not full, element by
// element.
template <class E, int kSize, bool kAligned>
struct Packs {
  using V = Vec<E, kSize>;
  E* data;
  int size;

  __device__ V load_in_order(int pack) const {
    if constexpr (kAligned && sizeof(V) <= 16) {
      return load_vec_in_order<V>(data + pack * kSize);
    } else {
      return load(pack);
    }
  }
  __device__ V load(int pack) const {
    if constexpr (kAligned) {
      return load_vec<V>(data + pack * kSize);
    } else {
      return load_some<V>(data + pack * kSize, size - pack * kSize);
    }
  }
  __device__ void store(int pack, const V& v) const {
    if constexpr (kAligned) {
      store_vec(data + pack * kSize, v);
    } else {
      store_some(data + pack * kSize, v, size - pack * kSize);
    }
  }
  // Elements that a pack really has.
  __device__ int count(int pack) const { return kAligned ? kSize : min(kSize, size - pack * kSize); }
};

// `size` elements of row `row`, from `first` on.
struct Part {
  int64_t row;
  int first, size;

  template <class E, int kSize, bool kAligned>
  __device__ Packs<E, kSize, kAligned> of(const void* data, const Rows& rows) const {
    return {static_cast<E*>(const_cast<void*>(data)) + rows.offset(row) + first, size};
  }
};

// Weights are loaded early as they lie; those in float32 beside 16-bit data, twice the registers, when they are needed.
template <class T, bool kAligned>
struct Weights {
  using Raw = Pack<T>;
  const void* data;
  bool is_float32;
  float otherwise;  // where there are none
  int first, size;

  __device__ Weights(const RowWeights& weights, float otherwise, const Part& part)
      : data(weights.data),
        is_float32(sizeof(T) < 4 && weights.is_float32),
        otherwise(otherwise),
        first(part.first),
        size(part.size) {}
  template <class E>
  __device__ Packs<E, kPackSize<T>, kAligned> packs() const {
    return {static_cast<E*>(const_cast<void*>(data)) + first, size};
  }
  __device__ Raw load(int pack) const {
    return data && !is_float32 ? packs<T>().load(pack) : filled<T, kPackSize<T>>(otherwise);
  }
  __device__ Vec<float, kPackSize<T>> floats(int pack, const Raw& raw) const {
    if (is_float32) return packs<float>().load(pack);
    return to_floats(raw);
  }
};

// Sources.

template <class T, bool kAligned>
struct Input {
  using Element = T;
  using Raw = Pack<T>;
  using Value = Pack<T>;
  Packs<T, kPackSize<T>, kAligned> input;

  __device__ Input(const RowNormArgs& args, const Part& part)
      : input(part.of<T, kPackSize<T>, kAligned>(args.input, args.input_rows)) {}
  __device__ Raw load(int pack) const { return input.load_in_order(pack); }
  __device__ Value value(const Raw& raw) const { return raw; }
  __device__ void keep(int, const Value&) const {}
};

// input + residual, the residual an array of R.  kRounded: to R before anything else, as it is kept.
template <class R, bool kRounded>
struct WithResidual {
  template <class T, bool kAligned>
  struct Source {
    using Element = T;
    static constexpr int kSize = kPackSize<T>;
    struct Raw {
      Pack<T> input;
      Vec<R, kSize> residual;
    };
    using Value = std::conditional_t<kRounded, Vec<R, kSize>, Vec<float, kSize>>;
    Packs<T, kSize, kAligned> input;
    Packs<R, kSize, kAligned> residual;

    __device__ Source(const RowNormArgs& args, const Part& part)
        : input(part.of<T, kSize, kAligned>(args.input, args.input_rows)),
          residual(part.of<R, kSize, kAligned>(args.residual, args.residual_rows)) {}
    __device__ Raw load(int pack) const { return {input.load_in_order(pack), residual.load_in_order(pack)}; }
    __device__ Value value(const Raw& raw) const {
      auto sum = to_floats(raw.input);
      const auto other = to_floats(raw.residual);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += other[i];
      if constexpr (kRounded) {
        return round_to<R>(sum);
      } else {
        return sum;
      }
    }
    __device__ void keep(int pack, const Value& v) const {
      if constexpr (kRounded) {
        residual.store(pack, v);
      } else {
        residual.store(pack, round_to<R>(v));
      }
    }
  };
};

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
template <class T, int kSize>
__device__ float largest_of(const Vec<T, kSize>& v) {
  const auto floats = to_floats(v);
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) most = fmaxf(most, fabsf(floats[i]));  // passes NaN over
  return most;
}

// (v - centre) * r.
template <bool kCentred, class T, int kSize>
__device__ Vec<float, kSize> normed(const Vec<T, kSize>& v, float centre, float r) {
  auto floats = to_floats(v);
#pragma unroll
  for (int i = 0; i < kSize; ++i) floats[i] = (kCentred ? floats[i] - centre : floats[i]) * r;
  return floats;
}

// Over the threads of a row: kThreads, or the whole block (0).  Each use in a kernel has a number of its own.
template <int kThreads, int kUse, class Combine>
__device__ float row_reduce(float v, Combine combine) {
  if constexpr (kThreads == 0) {
    return block_reduce<kUse>(v, static_cast<int>(blockDim.x) / 32, combine);
  } else if constexpr (kThreads <= 32) {
    return warp_reduce(v, kThreads, combine);
  } else {
    return block_reduce<kUse>(v, kThreads / 32, combine);
  }
}

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

// Rows that stay in registers.
template <class Source, class Result, bool kCentred, int kThreads, int kPacks>
__global__ __launch_bounds__(kBlockSize<kThreads>) void row_norm_kernel(const __grid_constant__
                                                                        typename Result::Args args,
                                                                        float inverse_size) {
  using T = typename Source::Element;
  constexpr int kRows = kBlockSize<kThreads> / kThreads;
  const int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int hidden_size = static_cast<int>(args.hidden_size);
  const bool there = row < args.num_rows;  // threads without a row stay: their warp reduces with all lanes
  const int packs = there ? packs_of<T>(hidden_size) : 0;
  const Part part = Result::part_of(args, there ? row : 0);
  begin_dependent();

  const Source source(args, part);
  Result result(args, part);
  constexpr bool kWeightEarly = kThreads <= 256;
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
  if constexpr (kWeightEarly) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) load_beside(k);
  }

  typename Source::Value z[kPacks];
  float centre = 0.0f, sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    z[k] = source.value(raw[k]);
    if (thread + k * kThreads < packs) source.keep(thread + k * kThreads, z[k]);
    if constexpr (kCentred) {
      centre += sum_of(to_floats(z[k]));
    } else {
      sum += sum_of_squares<false>(to_floats(z[k]), 0.0f, 0);
    }
  }
  if constexpr (kCentred) {
    centre = mean_of(row_reduce<kThreads, 0>(centre, Sum()), hidden_size, inverse_size);
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      sum += sum_of_squares<true>(to_floats(z[k]), centre, thread + k * kThreads < packs ? kPackSize<T> : 0);
  }
  const float r = rsqrtf(fmaf(row_reduce<kThreads, 1>(sum, Sum()), inverse_size, args.epsilon));

  if constexpr (Result::kLargest == Largest::kNothing) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWeightEarly) load_beside(k);
      const int pack = thread + k * kThreads;
      if (pack < packs) result.store(pack, result.scaled(pack, normed<kCentred>(z[k], centre, r), beside[k]));
    }
  } else {
    typename Result::Value y[kPacks];
    float most[kPacks], of_row = 0.0f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWeightEarly) load_beside(k);
      const int pack = thread + k * kThreads;
      y[k] = {};
      if (pack < packs) y[k] = result.scaled(pack, normed<kCentred>(z[k], centre, r), beside[k]);
      most[k] = largest_of(y[k]);
      of_row = fmaxf(of_row, most[k]);
    }
    if constexpr (Result::kLargest == Largest::kOfRow) {
      result.scale_by(row_reduce<kThreads, 2>(of_row, Maximum()));
      if (there && thread == 0) result.store_scale(0);
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = thread + k * kThreads;
      if constexpr (Result::kLargest == Largest::kOfGroups) {
        const int lanes = result.group_size() / kPackSize<T>;  // a power of two: see in_lanes
        result.scale_by(warp_reduce(most[k], lanes, Maximum()));
        if (pack < packs && pack % lanes == 0) result.store_scale(pack / lanes);
      }
      if (pack < packs) result.store(pack, y[k]);
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
  const auto value = [&](int pack) { return source.value(source.load(pack)); };
  float centre = 0.0f, sum = 0.0f;
  if constexpr (kCentred) {
    for (int p = thread; p < packs; p += threads) centre += sum_of(to_floats(value(p)));
    centre = mean_of(row_reduce<0, 0>(centre, Sum()), static_cast<int>(args.hidden_size), inverse_size);
  }
#pragma unroll 2
  for (int p = thread; p < packs; p += threads)
    sum += sum_of_squares<kCentred>(to_floats(value(p)), centre, source.input.count(p));
  const float r = rsqrtf(fmaf(row_reduce<0, 1>(sum, Sum()), inverse_size, args.epsilon));

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
      result.scale_by(row_reduce<0, 2>(largest(source, result, thread, threads, packs), Maximum()));
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

// Launches a norm; in_packs: every row of every array consists of whole, aligned packs.  stays: rows may be held in
// registers.
template <template <class, bool> class Source, template <class, bool> class Result, class T, bool kCentred = false>
void launch_row_norm(const typename Result<T, true>::Args& args, bool in_packs, bool stays, const Launch& launch,
                     const char* op) {
  if (args.hidden_size > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^31 - 1 elements are not supported");
  const float inverse_size = 1.0f / static_cast<float>(args.hidden_size);
  const auto blocks = [&](int rows) {
    const int64_t n = (args.num_rows + rows - 1) / rows;
    if (n > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
    return dim3(static_cast<unsigned>(n));
  };
  const int packs = packs_of<T>(static_cast<int>(args.hidden_size));
  const auto mapped = [&]<int kThreads, int kPacks>() {
    constexpr bool kFits = kPacks > 0 && kThreads * kPacks <= 2048 * (sizeof(T) == 4 ? 2 : 1);
    if constexpr (kFits) {
      if (in_packs && stays)
        return launch_dependent(row_norm_kernel<Source<T, true>, Result<T, true>, kCentred, kThreads, kPacks>,
                                blocks(kBlockSize<kThreads> / kThreads), kBlockSize<kThreads>, launch, op, args,
                                inverse_size);
    }
    // as many threads: the order of addition is the same
    const uint32_t threads = kThreads < 32 ? 32 : kThreads;
    if (in_packs) {
      launch_dependent(row_norm_again_kernel<Source<T, true>, Result<T, true>, kCentred>, blocks(1), threads, launch,
                       op, args, inverse_size);
    } else {
      launch_dependent(row_norm_again_kernel<Source<T, false>, Result<T, false>, kCentred>, blocks(1), threads, launch,
                       op, args, inverse_size);
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

// Whether the arrays of RowNormArgs consist of whole, aligned packs, out having elements of out_size bytes, residual of
// residual_size.
template <class T>
bool in_packs(const RowNormArgs& args, int64_t out_size, int64_t residual_size) {
  constexpr int64_t kSize = kPackSize<T>;
  return args.hidden_size % kSize == 0 && rows_aligned(kAccessBytes, args.input, args.input_rows, sizeof(T)) &&
         rows_aligned(kSize * out_size, args.out, args.out_rows, out_size) &&
         rows_aligned(kAccessBytes, args.residual, args.residual_rows, residual_size) &&
         is_aligned(kAccessBytes, args.weights.data);
}

}  // namespace
}  // namespace pykv
