// Columns in another order.  Memory-bound, if what is picked out of a row does not come from memory one by one: a block brings some
// whole rows to shared memory, 16 bytes a thread at once, and picks there.  Rows that do not fit, or whose elements do not lie
// side by side, and rows that are fewer than multiprocessors, are read where they are: by many blocks each.
#include <algorithm>

#include "cuda/cp_async.cuh"
#include "cuda/dependent.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/vec.cuh"
#include "dequantization/permute_cols.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kMaxRows = 2;
constexpr int64_t kSharedBytes = 48 << 10, kMostParts = 32768;

struct Plan {
  int32_t rows_per_block;
  int64_t columns_per_block;
  bool staged, loads_aligned, stores_aligned;
};

template <class Word>
__device__ void stage_row(Word* to, const Word* from, int64_t columns, bool aligned) {
  constexpr int kSize = kPackSize<Word>;
  const int64_t vectors = aligned ? columns / kSize : 0;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads)
    cp_async_16(shared_address(to + i * kSize), from + i * kSize);
  for (int64_t i = vectors * kSize + threadIdx.x; i < columns; i += kThreads) to[i] = from[i];
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    permute_cols_kernel(const __grid_constant__ PermuteColsArgs args, const __grid_constant__ Plan plan,
                        const Reporter report) {
  extern __shared__ uint4 shared[];
  constexpr int kSize = kPackSize<Word>;
  begin_dependent();
  Word* staged = reinterpret_cast<Word*>(shared);
  const int64_t pitch = (args.columns + kSize - 1) / kSize * kSize;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * plan.rows_per_block, left = args.num_rows - first;
  const int rows = left < plan.rows_per_block ? static_cast<int>(left) : plan.rows_per_block;
  const Word* in[kMaxRows];
  Word* out[kMaxRows];
#pragma unroll
  for (int r = 0; r < kMaxRows; ++r) {
    if (r >= rows) break;
    in[r] = static_cast<const Word*>(args.input) + args.input_rows.offset(first + r);
    out[r] = static_cast<Word*>(args.output) + args.output_rows.offset(first + r);
    if (plan.staged) stage_row(staged + r * pitch, in[r], args.columns, plan.loads_aligned);
  }
  const int64_t begin = blockIdx.y * plan.columns_per_block, end = min(args.columns, begin + plan.columns_per_block);
  int64_t c = begin + static_cast<int64_t>(threadIdx.x) * kSize, order[kSize];
  const auto read_order = [&] {
#pragma unroll
    for (int i = 0; i < kSize; ++i) order[i] = c + i < end ? args.order[c + i] : 0;
  };
  read_order();  // while rows are under way
  if (plan.staged) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }
  for (; c < end; c += kThreads * kSize, read_order()) {
    int32_t from[kSize];  // -1: none
    bool whole = plan.stores_aligned && c + kSize <= end;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const bool valid = order[i] >= 0 && order[i] < args.columns, there = c + i < end;
      from[i] = valid && there ? static_cast<int32_t>(order[i]) : -1;
      if (!valid && there && blockIdx.x == 0) report(order[i], args.columns);
      whole &= valid;
    }
    Word words[kMaxRows][kSize];
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        words[r][i] = 0;
        if (from[i] >= 0) words[r][i] = plan.staged ? staged[r * pitch + from[i]] : in[r][from[i] * args.input_column];
      }
    }
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r) {
      if (r >= rows) break;
      if (whole) {
        uint4 raw;
        __builtin_memcpy(&raw, words[r], sizeof raw);
        *reinterpret_cast<uint4*>(out[r] + c) = raw;
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          if (from[i] >= 0) out[r][(c + i) * args.output_column] = words[r][i];
      }
    }
  }
}

template <class Word>
void launch_kernel(const PermuteColsArgs& args, const Launch& launch) {
  constexpr int64_t kItem = sizeof(Word);
  const int64_t row_bytes = (args.columns * kItem + 15) / 16 * 16, sms = num_sms(launch.device);
  Plan plan{};
  // Few rows are read where they are, by many blocks each.
  plan.staged = args.input_column == 1 && row_bytes <= kSharedBytes && args.num_rows >= sms;
  plan.rows_per_block = args.num_rows >= 4 * sms && (!plan.staged || 2 * row_bytes <= kSharedBytes) ? kMaxRows : 1;
  const int64_t at_once = kThreads * kPackSize<Word>, parts = (args.columns + at_once - 1) / at_once;
  plan.columns_per_block = plan.staged ? args.columns : (parts + kMostParts - 1) / kMostParts * at_once;
  plan.loads_aligned = rows_aligned(16, args.input, args.input_rows, kItem);
  plan.stores_aligned = args.output_column == 1 && rows_aligned(16, args.output, args.output_rows, kItem);
  const int64_t blocks = (args.num_rows + plan.rows_per_block - 1) / plan.rows_per_block;
  if (blocks > INT32_MAX || args.columns > INT32_MAX)
    fail(PYKV_NOT_IMPLEMENTED, "A: 2^31 columns or blocks of rows in one call are not supported");
  const auto bytes = static_cast<size_t>(plan.staged ? plan.rows_per_block * row_bytes : 0);
  const int64_t across = (args.columns + plan.columns_per_block - 1) / plan.columns_per_block;
  launch_dependent_shared(permute_cols_kernel<Word>, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(across)),
                          kThreads, bytes, launch, "permute_cols", args, plan, launch.reporter("permute_cols: perm"));
}

}  // namespace

void permute_cols_cuda(const PermuteColsArgs& args, const Launch& launch) {
  switch (args.item) {
    case 1:
      return launch_kernel<uint8_t>(args, launch);
    case 2:
      return launch_kernel<uint16_t>(args, launch);
    case 4:
      return launch_kernel<uint32_t>(args, launch);
    default:
      return launch_kernel<uint64_t>(args, launch);
  }
}

}  // namespace pykv
