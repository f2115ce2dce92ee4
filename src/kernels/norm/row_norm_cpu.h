// The row reduction behind all norms, as row_norm.cuh has it: a source says what is normed, a result what becomes of it.
//
// A row is one thread's.  It is read once for each pass, from the cache after the first; what costs more than reading again
// is kept in a row of floats, in L1 for rows up to some thousand elements.  The last pass writes, past the caches if that
// is much and lies elsewhere, and prefetches the next row: the hardware's own prefetching stops where a row ends, and
// memory would idle while rows are worked out.
//
// Bound by memory for rows that come from there: each byte is moved once in and once out.  In bf16 with AVX-512, RMS norm
// takes 28 vector instructions for 32 elements, LayerNorm 37, which Zen 4 can do in 14 and 19 cycles; one of two cores that
// copy together moves their 128 bytes in 27.  Codes are a quarter less to move (20 cycles) and more to work out: E4M3 takes
// 46 instructions (23 cycles) by a static scale and 75 (38 cycles) by scales of rows, which arithmetic bounds.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/pairs.h"
#include "cpu/parallel.h"
#include "norm/row_norm.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kSums = 2;  // independent additions of pairs in flight; their order is the same for every row

// The sum of term(i, count) over a row: of blocks, since long sums of floats lose digits.  Flattened, as each_pair is.
template <class Term>
[[gnu::flatten]] float row_sum(int64_t n, Term term) {
  constexpr int64_t kStep = kSums * kPair, kBlock = 256 * kStep;
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    decltype(term(int64_t{}, int64_t{})) sums[kSums] = {0.0f, 0.0f};
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep)
      for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + term(i + k * kPair, int64_t{kPair});
    for (; i < end; i += kPair) sums[0] = sums[0] + term(i, std::min<int64_t>(end - i, kPair));
    total += sum(sums[0] + sums[1]);
  }
  return static_cast<float>(total);
}

template <class E>
E* row_at(const void* data, const Rows& rows, int64_t row) {
  return static_cast<E*>(const_cast<void*>(data)) + rows.offset(row);
}

template <class T>
struct Weights {
  const void* data;
  bool is_float32;
  float otherwise;  // where there are none

  Weights(const RowWeights& weights, float otherwise)
      : data(weights.data), is_float32(weights.is_float32), otherwise(otherwise) {}
  Pair<T> operator()(int64_t i, int64_t count) const {
    if (!data) return otherwise;
    return is_float32 ? load_pair<T>(static_cast<const float*>(data) + i, count)
                      : load_pair<T>(static_cast<const T*>(data) + i, count);
  }
};

// Sources: what is normed, at its first reading (`first`) and later (`again`).  Those that keep what they
// worked out have a row of floats for it.

template <class T>
struct Input {
  static constexpr bool kKeeps = false;
  const T* input;

  Input(const RowNormArgs& args, int64_t row, float*) : input(row_at<T>(args.input, args.input_rows, row)) {}
  Pair<T> first(int64_t i, int64_t count) const { return load_pair<T>(input + i, count); }
  Pair<T> again(int64_t i, int64_t count) const { return first(i, count); }
  void prefetch_at(int64_t i) const { prefetch_pair(input + i); }
};

// input + residual, the residual an array of R.  kRounded: to R before anything else, and from then on it is the residual;
// else the residual changes at the second reading, which must be the last.
template <class T, class R, bool kRounded>
struct WithResidual {
  static constexpr bool kKeeps = false;
  const T* input;
  R* residual;

  WithResidual(const RowNormArgs& args, int64_t row, float*)
      : input(row_at<T>(args.input, args.input_rows, row)),
        residual(row_at<R>(args.residual, args.residual_rows, row)) {}
  Pair<T> first(int64_t i, int64_t count) const {
    Pair<T> v = load_pair<T>(input + i, count) + load_pair<T>(residual + i, count);
    if constexpr (kRounded) {
      if constexpr (!std::is_same_v<R, float>) v = rounded(v);
      store_pair(residual + i, v, count);
    }
    return v;
  }
  Pair<T> again(int64_t i, int64_t count) const {
    if constexpr (kRounded) return load_pair<T>(residual + i, count);
    const Pair<T> v = first(i, count);
    store_pair(residual + i, v, count);
    return v;
  }
  void prefetch_at(int64_t i) const {
    prefetch_pair(input + i);
    prefetch_pair(residual + i);
  }
};

// Memory of a thread for one row at a time, where a source or a result wants it.
struct Scratch {
  std::vector<float> values;   // of a source that keeps them
  std::vector<char> scaled;    // of a result by groups
  std::vector<float> largest;  // of each group
  LineWriter writer;

  Scratch(int64_t n, bool keeps, int64_t groups, bool streamed) : writer(streamed) {
    const int64_t pairs = n + kPair;  // the last of a group may reach beyond it
    if (keeps) values.resize(pairs);
    if (groups > 0) scaled.resize(pairs * sizeof(float)), largest.resize(groups);
  }
};

// One row; `scaled(i, count)` is the last reading of it.  Where the scale is known before:
template <class Result, class Scaled>
void write_row(LineWriter& writer, const Result& result, int64_t n, bool streamed, Scaled scaled) {
  using Element = typename Result::Element;
  write_pairs(writer, result.out, n, streamed, [&](Element* to, int64_t first, int64_t size, bool past) {
    each_pair(0, size, [&](int64_t i, int64_t count) { result.store(to + i, scaled(first + i, count), count, past); });
  });
}

// Where the largest of each group makes it.
// Where the largest of each group makes it: first all groups' largest, then all codes, so that the scale of one group is
// worked out while others are.  What is scaled is kept rounded to the result's own type T; rounding keeps the order, so that
// the largest may be rounded last.
template <class Result, class Scaled>
void write_groups(Scratch& scratch, Result& result, int64_t n, bool streamed, Scaled scaled) {
  using Element = typename Result::Element;
  using T = typename Result::Kept;
  const int64_t group = result.group_size();
  T* const kept = reinterpret_cast<T*>(scratch.scaled.data());
  for (int64_t begin = 0; begin < n; begin += group) {
    Pair<T> most = 0.0f;
    each_pair(begin, begin + group, [&](int64_t i, int64_t count) {
      const Pair<T> y = scaled(i, count);
      store_whole_pair(kept + i, y);
      most = max(abs(y), most);  // passes NaN over
    });
    scratch.largest[begin / group] = to_float(from_float<T>(max(most)));
  }
  for (int64_t begin = 0; begin < n; begin += group) {
    result.scale_by(begin / group, scratch.largest[begin / group]);
    write_pairs(scratch.writer, result.out + begin, group, streamed,
                [&](Element* to, int64_t first, int64_t size, bool past) {
                  const T* from = kept + begin + first;
                  each_pair(0, size, [&](int64_t i, int64_t count) {
                    result.store(to + i, load_pair<T>(from + i, count), count, past);
                  });
                });
  }
}

template <bool kCentred, class Source, class Result>
void norm_row(const Source& source, const Source& next, Result& result, int64_t n, float epsilon, bool streamed,
              Scratch& scratch) {
  float squares, centre = 0.0f;
  if constexpr (kCentred) {
    centre = row_sum(n, [&](int64_t i, int64_t count) { return source.first(i, count); }) / static_cast<float>(n);
    squares = row_sum(n, [&](int64_t i, int64_t count) {
      const auto v = first_of(source.again(i, count) - centre, count);
      return v * v;
    });
  } else {
    squares = row_sum(n, [&](int64_t i, int64_t count) {
      const auto v = source.first(i, count);
      return v * v;
    });
  }
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
  const auto scaled = [&](int64_t i, int64_t count) {
    const auto v = source.again(i, count);
    next.prefetch_at(i);
    return result.scaled(i, (kCentred ? v - centre : v) * r, count);
  };
  if constexpr (Result::kByLargest) {
    write_groups(scratch, result, n, streamed, scaled);
  } else {
    write_row(scratch.writer, result, n, streamed, scaled);
  }
}

// All rows: Source(args, row, row of floats) is that of a row, and result_of(row) what becomes of it.
template <class Source, bool kCentred = false, class Args, class ResultOf>
void norm_rows(const Args& args, ResultOf result_of) {
  using Result = decltype(result_of(int64_t{}));
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t n = args.hidden_size;
  const bool streamed = args.out != args.input &&
                        args.num_rows * n * static_cast<int64_t>(sizeof(typename Result::Element)) > kWorthStreaming;
  parallel_for(args.num_rows, std::max<int64_t>(1, kElementsWorthAThread / n), [&](int64_t begin, int64_t end) {
    int64_t groups = 0;
    if constexpr (Result::kByLargest) groups = n / args.group_size;
    Scratch scratch(n, Source::kKeeps, groups, streamed);
    float* const values = scratch.values.data();
    Source source(args, begin, values);
    for (int64_t row = begin; row < end; ++row) {
      const Source next(args, std::min(row + 1, end - 1), values);
      Result result = result_of(row);
      norm_row<kCentred>(source, next, result, n, args.epsilon, streamed, scratch);
      source = next;
    }
    if (streamed) finish_streaming();
  });
}

}  // namespace
}  // namespace pykv::PYKV_ISA
