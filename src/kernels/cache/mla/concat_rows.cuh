// Rows of two parts into one row each: out[place(r)] = concat(a[r], b[r]), copied or quantised.
//
// Memory-bound: each element is read and written once.  The vectors of all rows are numbered through, so that no lane idles
// whatever the width of a row; a thread takes one vector of up to four neighbouring rows, which puts all its loads under
// way, those of their ids too, before the first store, and works out its place in the row once.
#pragma once

#include "cache/mover.cuh"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"

namespace pykv {

inline constexpr int kConcatThreads = 128, kFullSm = 2048;  // threads of a block; of an SM

// Rows numbered (outer, inner): offsets in bytes.
struct RowMap {
  Divider inner_size;
  int64_t outer, inner;

  static RowMap plain(int64_t row) { return {Divider(0x7fffffff), 0, row}; }

  // Of neighbouring rows.
  template <int kRows>
  __device__ void offsets(uint32_t first, int64_t (&at)[kRows]) const {
    uint32_t i;
    uint32_t o = inner_size(first, i);
    at[0] = o * outer + i * inner;
#pragma unroll
    for (int r = 1; r < kRows; ++r) {
      at[r] = at[r - 1] + inner;
      if (++i == inner_size.d) {
        i = 0;
        at[r] = ++o * outer;
      }
    }
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
  uint32_t num_rows;
};

// f.operator()<rows of a thread>(): fewer than kMost, which is 2 or 4, where more would leave SMs without work, or with so
// little that nothing hides the arithmetic of a thread (fp8 of 4096 tokens on an H200: 4.5 us by four rows, 3.8 by two).
template <int kMost, class F>
void dispatch_rows_per_thread(int64_t rows, int64_t vectors, const Launch& launch, F&& f) {
  const int64_t threads = rows * vectors / num_sms(launch.device);  // of an SM, were each to take one row
  if (threads < 4 * kConcatThreads) return f.template operator()<1>();
  if (kMost == 2 || threads < 4 * kFullSm) return f.template operator()<2>();
  f.template operator()<kMost>();
}

// launch_some(first row, blocks) for as many rows at a time as one launch can take: vectors are numbered by 31 bits.
template <class F>
void for_each_concat_launch(int64_t num_rows, int64_t vectors, int rows_per_thread, F&& launch_some,
                            int threads = kConcatThreads) {
  const int64_t most = ((int64_t{1} << 30) / vectors / rows_per_thread + 1) * rows_per_thread;
  for (int64_t first = 0; first < num_rows; first += most) {
    const int64_t rows = num_rows - first < most ? num_rows - first : most;
    const int64_t groups = (rows + rows_per_thread - 1) / rows_per_thread;
    launch_some(static_cast<uint32_t>(first), static_cast<uint32_t>((groups * vectors + threads - 1) / threads));
  }
}

// Target: `Ids<kRows> ids(uint32_t first, uint32_t end)` starts the loads of what it must know of rows first, first + 1 ...
// (up to `end`); `char* place(ids, i)` is null for a row that is not to be written; `store(to, vector)` writes it.  Waits for
// the kernel before.
template <class Mover, int kRows, class Target, class ScaleOf>
__device__ __forceinline__ void concat_rows(const ConcatPlan& plan, const Target& target, const ScaleOf& scale_of,
                                            uint32_t first_row) {
  uint32_t vector;
  const uint32_t group = plan.vectors(blockIdx.x * kConcatThreads + threadIdx.x, vector);
  const uint32_t first = first_row + group * kRows;
  const bool in_a = vector < plan.a_vectors;
  int64_t a_offsets[kRows], b_offsets[kRows];
  plan.a.rows.offsets(first, a_offsets);
  plan.b.rows.offsets(first, b_offsets);
  const char* part =
      in_a ? plan.a.data + vector * plan.a.vector : plan.b.data + (vector - plan.a_vectors) * plan.b.vector;
  const char* from[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    from[i] = part + (in_a ? a_offsets[i] : b_offsets[i]);
    have_ready(from[i]);
  }
  if (comes_early()) {
    target.prefetch_ids(first, plan.num_rows);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (first + i < plan.num_rows) prefetch(from[i]);
  }
  begin_dependent();

  // First what there is to work out while the elements are on their way.
  const auto ids = target.template ids<kRows>(first, plan.num_rows);
  const float scale = scale_of();
  typename Mover::Loaded loaded[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (first + i < plan.num_rows) loaded[i] = load_vec_in_order<typename Mover::Loaded>(from[i]);
  const Quotient quotient(scale);
  char* places[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) places[i] = first + i < plan.num_rows ? target.place(ids, i) : nullptr;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (places[i]) target.store(places[i] + vector * plan.out_vector, Mover::convert(loaded[i], quotient));
}

}  // namespace pykv
