// Rows of two parts into one row each: out[place(r)] = concat(a[r], b[r]), copied or quantised.
//
// Memory-bound: each element is read and written once.  The vectors of all rows are numbered through, so that no lane idles
// whatever the width of a row; a thread takes one vector of kRowsPerThread neighbouring rows, which puts all its loads
// under way before the first store, and works out its place in the row once.
#pragma once

#include "cache/mover.cuh"
#include "cuda/divider.cuh"
#include "cuda/launch.h"

namespace pykv {

inline constexpr int kConcatThreads = 128, kRowsPerThread = 4;

// Rows numbered (outer, inner): offsets in bytes.
struct RowMap {
  Divider inner_size;
  int64_t outer, inner;
  __device__ int64_t offset(uint32_t row) const {
    uint32_t i;
    const uint32_t o = inner_size(row, i);
    return o * outer + i * inner;
  }
};

struct ConcatPart {
  const char* data;
  RowMap rows;
  int64_t vector;  // bytes from one vector to the next
};

struct ConcatPlan {
  ConcatPart a, b;
  Divider vectors;     // of a row
  uint32_t a_vectors;  // its first ones
  int64_t out_vector;
  int64_t num_rows;
};

// A number of rows that one launch can take: vectors are numbered by 31 bits.
inline int64_t rows_of_a_launch(int64_t vectors) {
  return ((int64_t{1} << 30) / vectors / kRowsPerThread + 1) * kRowsPerThread;
}

inline uint32_t concat_blocks(int64_t rows, int64_t vectors) {
  const int64_t groups = (rows + kRowsPerThread - 1) / kRowsPerThread;
  return static_cast<uint32_t>((groups * vectors + kConcatThreads - 1) / kConcatThreads);
}

// Target: `char* operator()(int64_t row)`, null for a row that is not to be written.
template <class Mover, class Target>
__device__ __forceinline__ void concat_rows(const ConcatPlan& plan, const Target& target, float scale,
                                            int64_t first_row) {
  uint32_t vector;
  const uint32_t group = plan.vectors(blockIdx.x * kConcatThreads + threadIdx.x, vector);
  const int64_t first = first_row + int64_t{group} * kRowsPerThread;
  const bool in_a = vector < plan.a_vectors;
  const ConcatPart& part = in_a ? plan.a : plan.b;
  const char* from = part.data + (in_a ? vector : vector - plan.a_vectors) * part.vector;

  typename Mover::Loaded loaded[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i)
    if (first + i < plan.num_rows)
      loaded[i] = load_vec<typename Mover::Loaded>(from + part.rows.offset(static_cast<uint32_t>(first + i)));
  const Quotient quotient(scale);
  char* places[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) places[i] = first + i < plan.num_rows ? target(first + i) : nullptr;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i)
    if (places[i]) store_vec(places[i] + vector * plan.out_vector, Mover::convert(loaded[i], quotient));
}

}  // namespace pykv
