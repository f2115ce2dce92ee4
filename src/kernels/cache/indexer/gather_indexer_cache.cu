// dst_k[i], dst_scale[i] = values and scales of token i - start[r] of row i's request r, from their two places in its block.
//
// Memory-bound, but first a chain of ids: the request of a row, its block, then the bytes.  A block of threads takes
// neighbouring rows, whatever requests they belong to, so that the work is balanced by tokens.  One warp finds where they
// are (locate_rows.cuh), a row each lane: more warps that do so would queue for the same few ids.  Then all threads move the
// vectors of these rows, kVectorsPerThread loads in flight each, with those of the scales.
//
// On an H200 4096 tokens take 1.2 us, 16384 2.3, 65536 5.8, where a copy of as many bytes takes 2.1, 2.8 and 6.1: the first blocks do
// all but the last trip to memory while kernels before still run.  Fewer rows than half the SMs have blocks for are located after the wait
// alone.
#include <algorithm>

#include "cache/gathers/locate_rows.cuh"
#include "cache/indexer/gather_indexer_cache.h"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

constexpr int kMaxThreads = 256, kMostRows = 32, kVectorsPerThread = 4;

struct GatherIndexerPlan {
  RowLocator locate;
  const char* cache;
  int64_t block_bytes, scales_at;
  int64_t value_bytes, scale_bytes;  // of a token
  int64_t scale_step;                // from one scale of a row of dst_scale to the next
  GatheredRows values, scales;
  uint32_t rows;            // of a block of threads
  Divider vectors, groups;  // of a token's values, of its scales
  bool early;               // whether the first blocks find rows before the wait
};

// Where rows were found: null for one that no request has.
struct Places {
  const char *values[kMostRows], *scales[kMostRows];

  // Called by one warp.
  __device__ void set(const GatherIndexerPlan& plan, const PagedRequests::Place& place) {
    const char* block = plan.cache + place.block * plan.block_bytes;
    values[threadIdx.x] = place.block < 0 ? nullptr : block + place.offset * plan.value_bytes;
    scales[threadIdx.x] = block + plan.scales_at + place.offset * plan.scale_bytes;
  }
};

// Finds rows before the wait, brings them to L2, and loads them after it beside the ids that they were found by.  False where
// these have changed, and nothing was stored.  All that a block has to move must be under way in its threads at once.
//
// The next kernel may come up first of all: ids and rows are two trips to memory, longer than a kernel takes, so that it pays to be
// two kernels ahead.  4096 tokens took 2.3 us without either, 1.6 with that alone, 3.3 with the loads beside the ids alone, which
// the next kernel then has to wait for.
template <class Vector>
__device__ __forceinline__ bool gather_early(const GatherIndexerPlan& plan, int64_t first, uint32_t rows,
                                             const RowLocator::Guess& guess, Places& places) {
  let_next_kernel_start();
  const bool finds = threadIdx.x < 32;
  RowLocator::Seen seen;
  if (finds) {
    const PagedRequests::Place place = plan.locate(first, static_cast<int>(rows), guess, true, seen);
    places.set(plan, place);
    if (place.block >= 0) {
      prefetch(places.values[threadIdx.x], static_cast<uint32_t>(plan.value_bytes));
      prefetch(places.scales[threadIdx.x]);
    }
  }
  __syncthreads();
  const char *from[kVectorsPerThread], *scale_from = nullptr;
  char *to[kVectorsPerThread], *scale_to = nullptr;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    uint32_t vector;
    const uint32_t row = plan.vectors(threadIdx.x + i * blockDim.x, vector);
    from[i] = to[i] = nullptr;
    if (row < rows && places.values[row]) {
      from[i] = places.values[row] + vector * sizeof(Vector);
      to[i] = static_cast<char*>(plan.values.data) + (first + row) * plan.values.row + vector * sizeof(Vector);
    }
    have_ready(from[i]);
    have_ready(to[i]);
  }
  uint32_t group;
  const uint32_t row = plan.groups(threadIdx.x, group);
  if (row < rows && places.values[row]) {
    scale_from = places.scales[row] + 4 * group;
    scale_to = static_cast<char*>(plan.scales.data) + (first + row) * plan.scales.row + group * plan.scale_step;
  }
  have_ready(scale_from);
  have_ready(scale_to);
  wait_for_previous_kernel();

  RowLocator::Again again;
  if (finds) again = plan.locate.load_again(guess, seen);
  Vector loaded[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i)
    if (from[i]) loaded[i] = load_vec_in_order<Vector>(from[i]);
  int32_t scale;
  if (scale_from) scale = load_id(scale_from);
  if (__syncthreads_or(finds && !plan.locate.unchanged(guess, seen, again))) return false;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i)
    if (from[i]) store_vec(to[i], loaded[i]);
  if (scale_from) *reinterpret_cast<int32_t*>(scale_to) = scale;
  return true;
}

// Vector: what values move as.  Scales move as words, or byte by byte if values do.
template <class Vector>
__global__ void __launch_bounds__(kMaxThreads)
    gather_indexer_cache_kernel(const __grid_constant__ GatherIndexerPlan plan) {
  constexpr bool kBytes = sizeof(Vector) == 1;
  __shared__ Places places;
  if (blockIdx.x + 1 == gridDim.x) {  // one more than rows want
    begin_dependent();
    return plan.locate.check_starts();
  }
  const int64_t first = int64_t{blockIdx.x} * plan.rows, left = plan.locate.num_rows() - first;
  const uint32_t rows = left < plan.rows ? static_cast<uint32_t>(left) : plan.rows;
  const bool finds = threadIdx.x < 32, early = !kBytes && plan.early && comes_early();
  RowLocator::Guess guess;
  if (finds) guess = plan.locate.guess(first, static_cast<int>(rows), !early);
  if (early && gather_early<Vector>(plan, first, rows, guess, places)) return;
  if (!early) begin_dependent();
  if (finds) {
    RowLocator::Seen seen;
    places.set(plan, plan.locate(first, static_cast<int>(rows), guess, false, seen));
  }
  __syncthreads();

  uint32_t scale;
  char* scale_to;
  const auto load_scale = [&](uint32_t n) {
    uint32_t group;
    const uint32_t row = plan.groups(n, group);
    scale_to = nullptr;
    if (row >= rows || !places.values[row]) return;
    const char* from = places.scales[row] + 4 * group;
    scale_to = static_cast<char*>(plan.scales.data) + (first + row) * plan.scales.row + group * plan.scale_step;
    if constexpr (kBytes) {
      scale = 0;
      for (int b = 0; b < 4; ++b) scale |= uint32_t{static_cast<uint8_t>(from[b])} << (8 * b);
    } else {
      scale = *reinterpret_cast<const uint32_t*>(from);
    }
  };
  const auto store_scale = [&] {
    if (!scale_to) return;
    if constexpr (kBytes) {
      for (int b = 0; b < 4; ++b)  // of one float32, or four elements
        scale_to[plan.scales.bytes == 4 ? b : b * plan.scales.element] = static_cast<char>(scale >> (8 * b));
    } else {
      *reinterpret_cast<uint32_t*>(scale_to) = scale;
    }
  };
  load_scale(threadIdx.x);

  const uint32_t total = rows * plan.vectors.d;
  for (uint32_t n = threadIdx.x; n < total; n += blockDim.x * kVectorsPerThread) {
    Vector loaded[kVectorsPerThread];
    char* to[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      to[i] = nullptr;
      if (n + i * blockDim.x >= total) continue;
      uint32_t vector;
      const uint32_t row = plan.vectors(n + i * blockDim.x, vector);
      if (!places.values[row]) continue;
      loaded[i] = load_vec<Vector>(places.values[row] + vector * sizeof(Vector));
      to[i] = static_cast<char*>(plan.values.data) + (first + row) * plan.values.row +
              vector * (kBytes ? plan.values.element : int64_t{sizeof(Vector)});
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (to[i]) store_vec(to[i], loaded[i]);
  }

  store_scale();
  for (uint32_t n = threadIdx.x + blockDim.x; n < rows * plan.groups.d; n += blockDim.x) {
    load_scale(n);
    store_scale();
  }
}

template <class Vector>
void launch_kernel(const GatherIndexerArgs& args, const Launch& launch) {
  const int64_t vectors = args.block.values / static_cast<int64_t>(sizeof(Vector));
  // Fewer rows a block where that gives every SM something to do.
  int64_t rows = kMostRows;
  while (rows > 1 && 2 * args.num_rows < num_sms(launch.device) * rows) rows /= 2;
  const int64_t blocks = (args.num_rows + rows - 1) / rows;
  // Few rows have as many threads as vectors, many as few as leave the next kernels' blocks room on the chip: 16384 tokens take 2.3
  // us on an H200, not 3.4.
  const int64_t in_flight = rows < kMostRows ? 1 : kVectorsPerThread;
  const int64_t threads =
      std::clamp<int64_t>((rows * vectors + in_flight * 32 - 1) / (in_flight * 32) * 32, 32, kMaxThreads);
  if (blocks + 1 >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "too many rows for one call");
  const GatherIndexerPlan plan{RowLocator(args.requests, args.num_rows, launch.errors),
                               static_cast<const char*>(args.cache),
                               args.block_bytes,
                               args.block.scales_at(),
                               args.block.values,
                               args.block.scale_bytes(),
                               4 / args.scales.bytes * args.scales.element,
                               args.values,
                               args.scales,
                               static_cast<uint32_t>(rows),
                               Divider(vectors),
                               Divider(args.block.groups),
                               2 * blocks >= num_sms(launch.device) && rows * vectors <= threads * kVectorsPerThread &&
                                   rows * args.block.groups <= threads};
  launch_dependent(gather_indexer_cache_kernel<Vector>, static_cast<uint32_t>(blocks + 1),
                   static_cast<uint32_t>(threads), launch, "cp_gather_indexer_k_quant_cache", plan);
}

// Whether values can move as vectors of so many bytes, a multiple of 4, and scales as words.
bool fits(const GatherIndexerArgs& args, int64_t bytes) {
  return args.block.values % bytes == 0 && args.values.compact() && args.scales.compact() &&
         is_aligned(bytes, args.cache, {args.block_bytes}) && is_aligned(bytes, args.values.data, {args.values.row}) &&
         is_aligned(4, args.scales.data, {args.scales.row});
}

}  // namespace

void gather_indexer_cache_cuda(const GatherIndexerArgs& args, const Launch& launch) {
  if (args.block.values >= int64_t{1} << 24) fail(PYKV_NOT_IMPLEMENTED, "keys of 2^24 elements are not supported");
  if (fits(args, 16)) return launch_kernel<uint4>(args, launch);
  if (fits(args, 4)) return launch_kernel<uint32_t>(args, launch);
  launch_kernel<uint8_t>(args, launch);
}

}  // namespace pykv
