// dst_k[i], dst_scale[i] = values and scales of token i - start[r] of row i's request r, from their two places in its block.
//
// Memory-bound, but first a chain of ids: the request of a row, its bounds, the block, then the bytes.  A block of threads
// takes neighbouring rows, whatever requests they belong to, so that the work is balanced by tokens.  Its first two warps
// find the requests of its first and last row, 32 of them a step; between these two each row is searched for by a thread of
// its own, which is no search at all within one request.  Then all threads move the vectors of these rows,
// kVectorsPerThread loads in flight each, with those of the scales.
#include <algorithm>

#include "cache/gather_indexer_cache.h"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 128, kMaxRows = 128, kVectorsPerThread = 4;

struct GatherIndexerPlan {
  PagedRequests requests;
  ErrorWord* errors;
  const char* cache;
  int64_t block_bytes, scales_at;
  int64_t value_bytes, scale_bytes;  // of a token
  int64_t scale_step;                // from one scale of a row of dst_scale to the next
  GatheredRows values, scales;
  int64_t num_rows;
  uint32_t rows;            // of a block of threads
  Divider vectors, groups;  // of a token's values, of its scales
};

// The last request that starts at `row` or before (0 if none does), found by a whole warp: each lane looks at one of 32
// places that cut the rest into parts.  Whatever the ids are, it is a request.
__device__ int64_t find_request(const PagedRequests& requests, int64_t row) {
  const uint32_t lane = threadIdx.x % 32;
  int64_t low = 0, end = requests.num_requests;  // it is in [low, end)
  while (end - low > 1) {
    const int64_t step = (end - low + 31) / 32, at = low + lane * step;
    const bool starts_before = at < end && requests.starts[at] <= row;
    // lanes from the second on: their number is that of the part
    const uint32_t after = __ballot_sync(0xffffffffu, starts_before) >> 1;
    low += __popc(after) * step;
    end = min(end, low + step);
  }
  return low;
}

// kVector: what values move as.  Scales move as words, or byte by byte if values do.
template <class Vector>
__global__ void __launch_bounds__(kThreads)
    gather_indexer_cache_kernel(const __grid_constant__ GatherIndexerPlan plan) {
  constexpr bool kBytes = sizeof(Vector) == 1;
  __shared__ int64_t request_range[2];
  __shared__ const char* blocks[kMaxRows];
  __shared__ int64_t offsets[kMaxRows];
  begin_dependent();
  const int64_t first = int64_t{blockIdx.x} * plan.rows;
  const uint32_t rows = static_cast<uint32_t>(min(int64_t{plan.rows}, plan.num_rows - first));
  const uint32_t warp = threadIdx.x / 32;
  if (warp < 2) request_range[warp] = find_request(plan.requests, warp == 0 ? first : first + rows - 1);
  __syncthreads();
  if (threadIdx.x < rows) {
    const auto place = plan.requests.locate(first + threadIdx.x, request_range[0], request_range[1] + 1, plan.errors);
    blocks[threadIdx.x] = place.block < 0 ? nullptr : plan.cache + place.block * plan.block_bytes;
    offsets[threadIdx.x] = place.offset;
  }
  __syncthreads();

  uint32_t scale;
  char* scale_to = nullptr;
  const auto load_scale = [&](uint32_t n) {
    uint32_t group;
    const uint32_t row = plan.groups(n, group);
    scale_to = nullptr;
    if (row >= rows || !blocks[row]) return;
    const char* from = blocks[row] + plan.scales_at + offsets[row] * plan.scale_bytes + 4 * group;
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
  for (uint32_t n = threadIdx.x; n < total; n += kThreads * kVectorsPerThread) {
    Vector loaded[kVectorsPerThread];
    char* to[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      to[i] = nullptr;
      if (n + i * kThreads >= total) continue;
      uint32_t vector;
      const uint32_t row = plan.vectors(n + i * kThreads, vector);
      if (!blocks[row]) continue;
      loaded[i] = load_vec<Vector>(blocks[row] + offsets[row] * plan.value_bytes + vector * sizeof(Vector));
      to[i] = static_cast<char*>(plan.values.data) + (first + row) * plan.values.row +
              vector * (kBytes ? plan.values.element : int64_t{sizeof(Vector)});
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (to[i]) store_vec(to[i], loaded[i]);
  }

  store_scale();
  for (uint32_t n = threadIdx.x + kThreads; n < rows * plan.groups.d; n += kThreads) {
    load_scale(n);
    store_scale();
  }
}

template <class Vector>
void launch_kernel(const GatherIndexerArgs& args, const Launch& launch) {
  const int64_t vectors = args.block.values / static_cast<int64_t>(sizeof(Vector));
  int64_t rows = kMaxRows;  // fewer where that gives every SM something to do, or a thread enough
  while (rows > 1 && ((args.num_rows + rows - 1) / rows < 2 * num_sms(launch.device) ||
                      rows * vectors > kThreads * kVectorsPerThread))
    rows /= 2;
  const int64_t blocks = (args.num_rows + rows - 1) / rows;
  if (blocks >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "too many rows for one call");
  const GatherIndexerPlan plan{args.requests,
                               launch.errors,
                               static_cast<const char*>(args.cache),
                               args.block_bytes,
                               args.block.scales_at(),
                               args.block.values,
                               args.block.scale_bytes(),
                               4 / args.scales.bytes * args.scales.element,
                               args.values,
                               args.scales,
                               args.num_rows,
                               static_cast<uint32_t>(rows),
                               Divider(vectors),
                               Divider(args.block.groups)};
  launch_dependent(gather_indexer_cache_kernel<Vector>, static_cast<uint32_t>(blocks), kThreads, launch,
                   "cp_gather_indexer_k_quant_cache", plan);
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
