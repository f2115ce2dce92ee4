// Memory-bound: each logit is read once (top_k_candidates.cuh).  Where rows are few, a cluster of blocks shares one; its first
// block puts the lists together.
#include "sampling/top_k_candidates.cuh"
#include "sampling/top_k_per_row.h"

namespace pykv {
namespace {

struct Reporters {
  Reporter arguments[3], nan;
};

template <class T>
__global__ __launch_bounds__(kSelectThreads, 2) void top_k_per_row_kernel(const __grid_constant__ TopKPerRowArgs args,
                                                                          int blocks, int room,
                                                                          const __grid_constant__ Reporters reporters) {
  extern __shared__ __align__(16) Entry entries[];
  __shared__ SelectMemory memory;
  __shared__ uint32_t bound_key, list_size;
  begin_dependent();
  const int thread = threadIdx.x, rank = static_cast<int>(blockIdx.x) % blocks;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  const bool is_first = rank == 0;
  const RowRange range = range_of_row(args, row, [&](RowArgument argument, int64_t value, int64_t bound) {
    if (is_first && thread == 0) reporters.arguments[static_cast<int>(argument)](value, bound);
  });
  const T* logits = static_cast<const T*>(args.logits) + row * args.logit_stride + range.begin;
  int32_t* indices = args.indices + row * args.index_stride;
  T* values = args.values ? static_cast<T*>(args.values) + row * args.value_stride : nullptr;
  const auto finish = [&](int i, int index) {  // place i of the results
    indices[i] = index;
    if (values) values[i] = index >= 0 ? logits[index] : from_float<T>(-__int_as_float(0x7f800000));
  };

  // All blocks of a row go the same way here.
  if (range.k == 0 || (range.k == range.size && !args.sorted)) {
    if (is_first)
      for (int i = thread; i < args.k; i += kSelectThreads) finish(i, i < range.k ? i : -1);
    return;
  }
  using Candidates = TopKCandidates<T>;
  const RowSlice<T> slice(logits, range.size, rank, blocks);
  int n = Candidates::find(slice, range.k, blocks, entries, room, bound_key, memory, [](float x, int) { return x; });
  if (blocks > 1) {
    if (n > range.k) {
      Candidates::cut(range.k, entries, n, memory);
      n = range.k;
    }
    n = gather_lists(entries, n, rank, blocks, list_size);
    if (!is_first) return;
  }
  n = first_entries(entries, n, range.k, args.sorted, memory);
  if (thread == 0 && args.sorted && key_of(entries[0]) == kKeyOfNan) reporters.nan(row, kRowHasNan);
  if (!args.sorted) {
    for (int i = thread; i < n; i += kSelectThreads) {
      if (key_of(entries[i]) == kKeyOfNan) reporters.nan(row, kRowHasNan);
      entries[i] = entries[i] << 32 | entries[i] >> 32;  // by index
    }
    __syncthreads();
    sort_entries(entries, n);
  }
  for (int i = thread; i < args.k; i += kSelectThreads) {
    const uint32_t index = i >= n ? 0u : args.sorted ? index_of(entries[i]) : ~key_of(entries[i]);
    finish(i, i < n ? static_cast<int>(index) : -1);
  }
}

}  // namespace

void top_k_per_row_cuda(const TopKPerRowArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    using Candidates = TopKCandidates<T>;
    const int blocks = blocks_for_row(args.num_rows, args.num_cols, Candidates::most_blocks(args.k), launch);
    const int room = Candidates::room(args.k, blocks);
    Reporters reporters{.arguments = {}, .nan = launch.reporter("top_k_per_row: logits")};
    for (int i = 0; i < 3; ++i) reporters.arguments[i] = launch.reporter(kRowArguments[i]);
    launch_rows<top_k_per_row_kernel<T>>(args.num_rows, blocks, kSelectThreads, room * static_cast<int>(sizeof(Entry)),
                                         launch, "top_k_per_row", args, blocks, room, reporters);
  });
}

}  // namespace pykv
