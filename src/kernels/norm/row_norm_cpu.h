// The row reduction behind all norms, as row_norm.cuh has it: a source says what is normed, a result what becomes of it.
//
// A row is one thread's.  It is read once for each pass, from the cache after the first; what costs more than reading again
// is kept in a row of floats, in L1 for rows up to some thousand elements.  The last pass writes, past the caches if that
// is much and lies elsewhere.  The next row is prefetched, one half while sums are worked out, the other while results are:
// the hardware's own prefetching stops where a row ends, and memory would idle.
//
// Bound by memory for rows that come from there: each byte is moved once in and once out.  In bf16 with AVX-512, Zen 5 takes
// 8 cycles for 32 elements of RMS norm and 12 for LayerNorm, where one of two cores that copy together moves their 128
// bytes in 13 to 25, as the neighbours of a virtual machine leave it.  Codes are a quarter less to move and more to work
// out, which bounds them: E4M3 takes 14 cycles by a static scale, 18 by scales of rows and 23 by scales of 128 elements, each of
// which has tables of its own; int8 13 and 15.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/largest.h"
#include "cpu/pairs.h"
#include "cpu/parallel.h"
#include "norm/row_norm.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kSums = 2;  // independent additions of pairs in flight; their order is the same for every row

// The sum of term(i, count) over a row: of blocks, since long sums of floats lose digits; meanwhile(i), every other pair.
// Flattened, as each_pair is.
template <class Term, class Meanwhile>
[[gnu::flatten]] float row_sum(int64_t n, Term term, Meanwhile meanwhile) {
  constexpr int64_t kStep = kSums * kPair, kBlock = 256 * kStep;
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    decltype(term(int64_t{}, int64_t{})) sums[kSums] = {0.0f, 0.0f};
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) {
      meanwhile(i);
      for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + term(i + k * kPair, int64_t{kPair});
    }
    for (; i < end; i += kPair) sums[0] = sums[0] + term(i, std::min<int64_t>(end - i, kPair));
    total += sum(sums[0] + sums[1]);
  }
  return static_cast<float>(total);
}
template <class Term>
float row_sum(int64_t n, Term term) {
  return row_sum(n, term, [](int64_t) {});
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

  Weights(const RowWeights& weights, float otherwise, int64_t row = 0)
      : data(weights.data), is_float32(weights.is_float32), otherwise(otherwise) {
    const int64_t size = is_float32 ? 4 : sizeof(T);
    if (weights.stride != 0) data = static_cast<const char*>(data) + row / weights.rows * weights.stride * size;
  }
  Pair<T> operator()(int64_t i, int64_t count) const {
    if (!data) return otherwise;
    return is_float32 ? plain(load_pair<T>(static_cast<const float*>(data) + i, count))
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

// input + residual.  kRounded: to T before anything else, and from then on it is the residual; else the residual changes at the second reading, which must be the last.
template <class T, bool kRounded>
struct WithResidual {
  static constexpr bool kKeeps = false;
  const T* input;
  T* residual;

  WithResidual(const RowNormArgs& args, int64_t row, float*)
      : input(row_at<T>(args.input, args.input_rows, row)),
        residual(row_at<T>(args.residual, args.residual_rows, row)) {}
  Pair<T> first(int64_t i, int64_t count) const {
    Pair<T> v = load_pair<T>(input + i, count) + load_pair<T>(residual + i, count);
    if constexpr (kRounded) {
      if constexpr (!std::is_same_v<T, float>) v = rounded(v);
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

// What a group is normed by; the centre is 0 but where rows are centred.
struct Norm {
  float centre, inverse;
};

// Memory of a thread for one row at a time, where a source or a result wants it.
struct Scratch {
  std::vector<Norm> norms;             // of each group
  std::vector<float> values;           // of a source that keeps them
  std::vector<Line> scaled;            // of a result by groups
  std::vector<float> largest, scales;  // of each of its groups
  LineWriter writer;

  Scratch(int64_t n, int64_t groups, bool keeps, int64_t scale_groups, bool streamed)
      : norms(groups), largest(scale_groups + kWidth), scales(scale_groups), writer(streamed) {
    if (keeps) values.resize(n);
    if (scale_groups > 0)
      scaled.resize((n + kPair) * sizeof(float) / sizeof(Line) + 1);  // the last pair may reach beyond
  }
};

// A row in groups of that many elements; fill as in write_pairs, of pairs that begin where groups do.
template <class To, class Fill>
void write_grouped(LineWriter& writer, To* to, int64_t n, int64_t group, bool streamed, const Fill& fill) {
  const auto ends_in_line = [](auto bytes) { return static_cast<uint64_t>(bytes) % kLine == 0; };
  if (group == n || (ends_in_line(reinterpret_cast<uintptr_t>(to)) && ends_in_line(group * sizeof(To)))) {
    write_pairs(writer, to, n, streamed, fill);
  } else {
    writer.fill(to, n, [&](To* at, int64_t first, int64_t count) { fill(at, first, count, false); });
  }
}

// body(begin, end, g) for the groups of elements first ... last, or what is there of them.
template <class Body>
void each_group(int64_t first, int64_t last, int64_t group, const Body& body) {
  for (int64_t g = first / group, begin = first, end; begin < last; ++g, begin = end) {
    end = std::min((g + 1) * group, last);
    body(begin, end, g);
  }
}

// body(i, count, g) for pairs of elements first ... last, each of one group.  Flattened, as each_pair is.
template <class Body>
[[gnu::flatten]] void each_pair_of_groups(int64_t first, int64_t last, int64_t group, const Body body) {
  each_group(first, last, group, [&](int64_t begin, int64_t end, int64_t g) {
    int64_t i = begin;
    for (; i + kPair <= end; i += kPair) body(i, int64_t{kPair}, g);
    if (i < end) body(i, end - i, g);
  });
}

// The last reading of a row, scaled(i, count, norm), written.  Where the scale is known before, as numbers or, in a second
// step, codes of those:
template <class Result, class Scaled>
void write_row(Scratch& scratch, const Result& result, int64_t n, int64_t group, bool streamed, const Scaled& scaled) {
  const Norm* norms = scratch.norms.data();
  write_grouped(scratch.writer, result.out, n, group, streamed, [&](auto* to, int64_t first, int64_t size, bool past) {
    if constexpr (requires { typename Result::Kept; }) {
      using T = typename Result::Kept;
      in_two_steps<T>(
          to, size,
          [&](T* kept, int64_t begin, int64_t count) {
            each_pair_of_groups(first + begin, first + begin + count, group, [=](int64_t i, int64_t count, int64_t g) {
              store_pair(kept + (i - first - begin), scaled(i, count, norms[g]), count);
            });
          },
          [&](auto* at, const T* kept, int64_t count) { result.encode(at, kept, count, past); });
    } else {
      each_pair_of_groups(first, first + size, group, [=](int64_t i, int64_t count, int64_t g) {
        store_pair(to + (i - first), scaled(i, count, norms[g]), count, past);
      });
    }
  });
}

// Where the largest of each group makes it: first all groups' largest, then all codes, so that the scale of one group is
// worked out while others are.  What is scaled is kept rounded to the result's own type T; rounding keeps the order, so that
// the largest may be rounded last.
template <class Result, class Scaled>
void write_by_largest(Scratch& scratch, const Result& result, int64_t n, bool streamed, const Scaled& scaled) {
  using T = typename Result::Kept;
  const int64_t group = result.group_size();
  T* const kept = reinterpret_cast<T*>(scratch.scaled.data());
  const Norm norm = scratch.norms[0];
  const int64_t groups = n / group;
  float *const largest = scratch.largest.data(), *const scales = scratch.scales.data();
  for (int64_t first = 0; first < groups; first += kWidth) {
    const int64_t some = std::min<int64_t>(groups - first, kWidth);
    Words lanes[kWidth] = {};
    for (int64_t g = 0; g < some; ++g) {
      const int64_t begin = (first + g) * group;
      const auto next = [=](Largest<T> most, int64_t i, int64_t count) {
        most.keep(kept + i, scaled(i, count, norm));
        return most;
      };
      lanes[g] = fold_pairs(begin, begin + group, Largest<T>(), next).lanes();
    }
    store(largest + first, Largest<T>::values(largest_lanes(lanes)));  // NaN, where there is any
    for (int64_t g = first; g < first + some; ++g)
      scales[g] = std::isnan(largest[g]) ? largest_number(kept + g * group, group) : largest[g];
  }
  result.make_scales(scales, groups);
  write_grouped(scratch.writer, result.out, n, group, streamed, [&](auto* to, int64_t first, int64_t size, bool past) {
    each_group(first, first + size, group, [&](int64_t begin, int64_t end, int64_t g) {
      result.encode(to + (begin - first), kept + begin, end - begin, scales[g], largest[g], past);
    });
  });
}

template <bool kCentred, class Source>
Norm norm_of(const Source& source, const Source& next, int64_t begin, int64_t n, float epsilon) {
  const auto ahead = [=](int64_t i) { next.prefetch_at((begin + i) / 2); };
  float squares, centre = 0.0f;
  if constexpr (kCentred) {
    const float total = row_sum(n, [=](int64_t i, int64_t count) { return source.first(begin + i, count); }, ahead);
    centre = total / static_cast<float>(n);
    squares = row_sum(n, [=](int64_t i, int64_t count) {
      const auto v = first_of(source.again(begin + i, count) - centre, count);
      return v * v;
    });
  } else {
    squares = row_sum(
        n,
        [=](int64_t i, int64_t count) {
          const auto v = source.first(begin + i, count);
          return v * v;
        },
        ahead);
  }
  return {centre, 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon)};
}

// A row of n elements, in groups with norms of their own.
template <bool kCentred, class Source, class Result>
void norm_row(const Source& source, const Source& next, Result& result, int64_t n, int64_t group, float epsilon,
              bool streamed, Scratch& scratch) {
  for (int64_t g = 0; g * group < n; ++g) scratch.norms[g] = norm_of<kCentred>(source, next, g * group, group, epsilon);
  const auto scaled = [source, next, result, n](int64_t i, int64_t count, Norm norm) {
    const auto v = source.again(i, count);
    next.prefetch_at((n + i) / 2);
    return result.scaled(i, (kCentred ? v - norm.centre : v) * norm.inverse, count);
  };
  if constexpr (Result::kByLargest) {
    write_by_largest(scratch, result, n, streamed, scaled);
  } else {
    write_row(scratch, result, n, group, streamed, scaled);
  }
}

// How many groups of hidden_size elements, rows of their own to the arguments, a row of the arrays has.
template <class Args>
int64_t groups_of(const Args& args) {
  if constexpr (requires { args.groups; }) return args.groups;
  return 1;
}

// All rows: Source(args, row, row of floats) is that of a row, and result_of(row) what becomes of it.
template <class Source, bool kCentred = false, class Args, class ResultOf>
void norm_rows(const Args& args, ResultOf result_of) {
  using Result = decltype(result_of(int64_t{}));
  constexpr int64_t kElementsWorthAThread = 32768;
  const float epsilon = plain(args.epsilon);
  const int64_t groups = groups_of(args), group = args.hidden_size, n = groups * group, rows = args.num_rows / groups;
  const bool streamed =
      args.out != args.input && rows * n * static_cast<int64_t>(sizeof(typename Result::Element)) > kWorthStreaming;
  parallel_for(rows, std::max<int64_t>(1, kElementsWorthAThread / n), [&](int64_t begin, int64_t end) {
    int64_t scales = 0;
    if constexpr (Result::kByLargest) scales = n / args.group_size;
    Scratch scratch(n, groups, Source::kKeeps, scales, streamed);
    float* const values = scratch.values.data();
    Source source(args, begin, values);
    for (int64_t row = begin; row < end; ++row) {
      const Source next(args, std::min(row + 1, end - 1), values);
      Result result = result_of(row);
      norm_row<kCentred>(source, next, result, n, group, epsilon, streamed, scratch);
      source = next;
    }
    if (streamed) finish_streaming();
  });
}

}  // namespace
}  // namespace pykv::PYKV_ISA
