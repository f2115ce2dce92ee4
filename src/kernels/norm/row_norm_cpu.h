// The row reduction behind all norms, as row_norm.cuh has it: a source says what is normed, a result what becomes of it.
//
// A row is one thread's.  It is read once for each pass, from the cache after the first, and nothing is kept between
// passes; the last one writes.  Bound by memory for rows that come from there: each byte is moved once in and once out
// (past the caches if it is much and lies elsewhere).
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "norm/row_norm.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kSums = 4;          // independent additions in flight; the order of addition is the same for every row
constexpr int64_t kPiece = 1024;  // elements that are streamed at once

// Calls body(i, count) for vectors that cover elements begin ... end; only the last may count less than kWidth of them.
template <class Body>
void each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) body(i, kWidth);
  if (i < end) body(i, end - i);
}

// The sum of term(i, count) over a row.
template <class Term>
float row_sum(int64_t n, Term term) {
  Floats sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= n; i += kSums * kWidth)
    for (int k = 0; k < kSums; ++k) sums[k] += term(i + k * kWidth, kWidth);
  for (; i < n; i += kWidth) sums[0] += term(i, n - i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// v where there are `count` elements, else 0.
inline Floats first_of(Floats v, int64_t count) {
  if (count >= kWidth) return v;
  float lanes[kWidth] = {};
  __builtin_memcpy(lanes, &v, count * sizeof(float));
  return load(lanes);
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
  Floats operator()(int64_t i, int64_t count) const {
    if (!data) return splat(otherwise);
    return is_float32 ? load(static_cast<const float*>(data) + i, count) : load(static_cast<const T*>(data) + i, count);
  }
};

// Sources.

template <class T>
struct Input {
  const T* input;

  Input(const RowNormArgs& args, int64_t row) : input(row_at<T>(args.input, args.input_rows, row)) {}
  Floats value(int64_t i, int64_t count) const { return load(input + i, count); }
  void keep(int64_t, Floats, int64_t) const {}
};

// input + residual, the residual an array of R.  kRounded: to R before anything else, as it is kept.
template <class T, class R, bool kRounded>
struct WithResidual {
  const T* input;
  R* residual;

  WithResidual(const RowNormArgs& args, int64_t row)
      : input(row_at<T>(args.input, args.input_rows, row)),
        residual(row_at<R>(args.residual, args.residual_rows, row)) {}
  Floats value(int64_t i, int64_t count) const {
    const Floats sum = load(input + i, count) + load(residual + i, count);
    return kRounded ? rounded<R>(sum) : sum;
  }
  void keep(int64_t i, Floats v, int64_t count) const { store(residual + i, v, count); }
};

// One row.  `out` is where result's elements go; `streamed` past the caches.
template <bool kCentred, class Source, class Result>
void norm_row(const Source& source, Result& result, typename Result::Element* out, int64_t n, float epsilon,
              bool streamed) {
  const auto value = [&](int64_t i, int64_t count) { return source.value(i, count); };
  float centre = 0.0f;
  if constexpr (kCentred) centre = row_sum(n, value) / static_cast<float>(n);
  const float squares = row_sum(n, [&](int64_t i, int64_t count) {
    const Floats v = kCentred ? first_of(value(i, count) - centre, count) : value(i, count);
    return v * v;
  });
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
  const auto scaled = [&](int64_t i, Floats v, int64_t count) {
    return result.scaled(i, (kCentred ? v - centre : v) * r, count);
  };

  const auto write = [&](int64_t begin, int64_t end, typename Result::Element* to) {
    each_vector(begin, end, [&](int64_t i, int64_t count) {
      const Floats v = value(i, count);
      source.keep(i, v, count);
      result.store(to + (i - begin), scaled(i, v, count), count);
    });
  };
  const int64_t group = result.group_size(n);
  for (int64_t begin = 0; begin < n; begin += group) {
    if constexpr (Result::kByLargest) {
      Floats most{};
      each_vector(begin, begin + group, [&](int64_t i, int64_t count) {
        const Floats y = first_of(scaled(i, value(i, count), count), count);
        most = max(y < 0.0f ? -y : y, most);  // passes NaN over
      });
      result.scale_by(begin / group, max(most));
    }
    if (!streamed) {
      write(begin, begin + group, out + begin);
      continue;
    }
    for (int64_t first = begin; first < begin + group; first += kPiece) {
      alignas(64) typename Result::Element piece[kPiece];
      const int64_t end = std::min(first + kPiece, begin + group);
      write(first, end, piece);
      stream_copy(reinterpret_cast<char*>(out + first), reinterpret_cast<const char*>(piece),
                  (end - first) * static_cast<int64_t>(sizeof(piece[0])));
    }
  }
}

// All rows: Source(args, row) and Result(args, row) are those of a row.
template <class Source, class Result, bool kCentred = false, class Args>
void norm_rows(const Args& args) {
  using Element = typename Result::Element;
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t n = args.hidden_size;
  const bool streamed =
      args.out != args.input && args.num_rows * n * static_cast<int64_t>(sizeof(Element)) > kWorthStreaming;
  parallel_for(args.num_rows, std::max<int64_t>(1, kElementsWorthAThread / n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Source source(args, row);
      Result result(args, row);
      norm_row<kCentred>(source, result, result.out, n, args.epsilon, streamed);
    }
    if (streamed) finish_streaming();
  });
}

}  // namespace
}  // namespace pykv::PYKV_ISA
