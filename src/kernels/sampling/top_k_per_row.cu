// Memory-bound: each logit is read once.  Where rows are few, a cluster of blocks shares one.  A row that has room in the shared
// memory of eight blocks or sixteen stays there (shared_top_k.cuh); else lists are made (top_k_candidates.cuh), and the first block
// puts them together.
#include "sampling/shared_top_k.cuh"
#include "sampling/top_k_candidates.cuh"
#include "sampling/top_k_per_row.h"

namespace pykv {
namespace {

struct Reporters {
  Reporter arguments[3], nan;
};

constexpr int kWindowWords = 4096;  // of a window of columns, a bit each

// kAlone: each block has a multiprocessor for itself, and so twice the registers.
template <class T, bool kAlone>
__global__ __launch_bounds__(kSelectThreads,
                             kAlone ? 1 : 2) void top_k_per_row_kernel(const __grid_constant__ TopKPerRowArgs args,
                                                                       int blocks, int room,
                                                                       const __grid_constant__ Reporters reporters) {
  extern __shared__ __align__(16) Entry entries[];
  __shared__ SelectMemory memory;
  __shared__ ExchangeMemory exchange_memory;
  RowExchange exchange(exchange_memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  begin_dependent();
  const int thread = threadIdx.x, rank = exchange.rank();
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  const bool is_first = rank == 0;
  const RowRange range = range_of_row(args, row, [&](RowArgument argument, int64_t value, int64_t bound) {
    if (is_first && thread == 0) reporters.arguments[static_cast<int>(argument)](value, bound);
  });
  const T* logits = static_cast<const T*>(args.logits) + row * args.logit_stride + range.begin;
  const auto finish = [&](int i, int index) {  // place i of the results; where that is, is worked out after the search
    args.indices[row * args.index_stride + i] = index;
    if (args.values)
      static_cast<T*>(args.values)[row * args.value_stride + i] =
          index >= 0 ? logits[index] : from_float<T>(-__int_as_float(0x7f800000));
  };

  const RowSlice<T> slice(logits, range.size, rank, blocks);
  exchange.wait_for_blocks();
  // All blocks of a row go the same way here.
  if (range.k == 0 || (range.k == range.size && !args.sorted)) {
    if (is_first)
      for (int i = thread; i < args.k; i += kSelectThreads) finish(i, i < range.k ? i : -1);
    return;
  }
  using Candidates = TopKCandidates<T, 4, kAlone>;
  int n = Candidates::find(slice, range.k, -INFINITY, exchange, entries, room, memory, [](float x, int) { return x; });
  if (!is_first) return;
  for (int i = range.k + thread; i < args.k; i += kSelectThreads) finish(i, -1);
  if (args.sorted || n <= kFewEntries) {
    n = first_entries(entries, n, range.k, memory);
    if (thread == 0 && key_of(entries[0]) == kKeyOfNan) reporters.nan(row, kRowHasNan);
    if (!args.sorted) {
      if (thread < n) entries[thread] = entry_of(0, index_of(entries[thread]));
      __syncthreads();
      sort_entries(entries, n);
    }
    for (int i = thread; i < n; i += kSelectThreads) finish(i, static_cast<int>(index_of(entries[i])));
    return;
  }
  const Entry bound = bound_of_first(entries, n, range.k, memory);
  // In the order of their indices: a bit for each column of a window, and a window after the other.
  using Words = Vec<uint32_t, 4>;
  constexpr int kWindow = 32 * kWindowWords, kOfThread = kWindowWords / 4 / kSelectThreads, kAtOnce = 4;
  static_assert(kWindowWords / 4 <= kSelectBins);
  Words* bits = reinterpret_cast<Words*>(entries + room);
  bool has_nan = false;
  uint32_t done = 0;
  for (uint32_t window = 0; window < static_cast<uint32_t>(range.size); window += kWindow) {
    for (int i = 0; i < kOfThread; ++i) bits[thread + i * kSelectThreads] = Words{};
    __syncthreads();
    each_entry<kAtOnce>(entries, n, [&](Entry entry) {
      const uint32_t at = index_of(entry) - window;
      if (entry < bound || at >= kWindow) return;
      atomicOr(&bits[0][0] + at / 32, 1u << at % 32);
      has_nan |= key_of(entry) == kKeyOfNan;
    });
    __syncthreads();
    // How many come before each vector of words, and so before each entry.
    uint32_t counts[kOfThread], count = 0, total;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const Words words = bits[thread * kOfThread + i];
      counts[i] = __popc(words[0]) + __popc(words[1]) + __popc(words[2]) + __popc(words[3]);
      count += counts[i];
    }
    uint32_t before = done + sum_before(count, memory, total);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      memory.bins[thread * kOfThread + i] = before;
      before += counts[i];
    }
    __syncthreads();
    each_entry<kAtOnce>(entries, n, [&](Entry entry) {
      const uint32_t at = index_of(entry) - window;
      if (entry < bound || at >= kWindow) return;
      const Words words = bits[at / 128];
      uint32_t place = memory.bins[at / 128];
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        const uint32_t lower = w < at / 32 % 4 ? ~0u : w == at / 32 % 4 ? (1u << at % 32) - 1u : 0u;
        place += __popc(words[w] & lower);
      }
      finish(static_cast<int>(place), static_cast<int>(index_of(entry)));
    });
    __syncthreads();
    done += total;
  }
  if (has_nan) reporters.nan(row, kRowHasNan);
}

// A row in the shared memory of a cluster's blocks.
template <class T>
__global__ __launch_bounds__(kSelectThreads, 1) void top_k_of_few_kernel(const __grid_constant__ TopKPerRowArgs args,
                                                                         int blocks,
                                                                         const __grid_constant__ Reporters reporters) {
  extern __shared__ __align__(16) char values[];
  __shared__ KthKeyMemory memory;
  SharedTopK<T>::open(memory);
  RowExchange exchange(memory.exchange, static_cast<int>(blockIdx.x) % blocks, blocks);
  const int thread = threadIdx.x;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  const bool is_first = exchange.rank() == 0;
  const T* whole_row = static_cast<const T*>(args.logits) + row * args.logit_stride;
  if (!args.starts.list.data && !args.ends.list.data)
    RowSlice<T>(whole_row, args.num_cols, exchange.rank(), blocks).prefetch_lines();
  begin_dependent();
  const RowRange range = range_of_row(args, row, [&](RowArgument argument, int64_t value, int64_t bound) {
    if (is_first && thread == 0) reporters.arguments[static_cast<int>(argument)](value, bound);
  });
  const T* logits = whole_row + range.begin;
  const auto finish = [&](int i, int index) {
    args.indices[row * args.index_stride + i] = index;
    if (args.values)
      static_cast<T*>(args.values)[row * args.value_stride + i] =
          index >= 0 ? logits[index] : from_float<T>(-__int_as_float(0x7f800000));
  };
  SharedTopK<T> top_k(RowSlice<T>(logits, range.size, exchange.rank(), blocks), reinterpret_cast<T*>(values), exchange,
                      memory);
  exchange.wait_for_blocks();
  top_k.wait_for_loads();
  const bool is_whole = range.k == range.size;
  if (is_first)
    for (int i = (is_whole ? 0 : range.k) + thread; i < args.k; i += kSelectThreads) finish(i, i < range.k ? i : -1);
  if (is_whole || range.k == 0) return;
  if (top_k.each_of_first(range.k, finish)) reporters.nan(row, kRowHasNan);
}

}  // namespace

void top_k_per_row_cuda(const TopKPerRowArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    constexpr auto kKernel = top_k_per_row_kernel<T, true>;
    const int blocks = blocks_for_row<kKernel>(args.num_rows, args.num_cols, launch);
    const int room = TopKCandidates<T>::room(args.k);
    Reporters reporters{.arguments = {}, .nan = launch.reporter("top_k_per_row: logits")};
    for (int i = 0; i < 3; ++i) reporters.arguments[i] = launch.reporter(kRowArguments[i]);
    constexpr auto kFew = top_k_of_few_kernel<T>;
    if (!args.sorted && blocks >= kPortableBlocks && SharedTopK<T>::has_room(args.num_cols, blocks) &&
        has_room_for<kFew>(args.num_rows, blocks, launch))
      return launch_rows<kFew>(args.num_rows, blocks, kSelectThreads,
                               SharedTopK<T>::kColumns * static_cast<int>(sizeof(T)), launch, "top_k_per_row", args,
                               blocks, reporters);
    dispatch_bool(has_room_for<kKernel>(args.num_rows, blocks, launch), [&]<bool kAlone>() {
      launch_rows<top_k_per_row_kernel<T, kAlone>>(args.num_rows, blocks, kSelectThreads,
                                                   room * static_cast<int>(sizeof(Entry)) + kWindowWords * 4, launch,
                                                   "top_k_per_row", args, blocks, room, reporters);
    });
  });
}

}  // namespace pykv
