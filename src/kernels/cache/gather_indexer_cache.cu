// dst_k[i], dst_scale[i] = values and scales of token i - start[r] of row i's request r, from their two places in its block.
//
// Memory-bound, but first a chain of ids: the request of a row, its block, then the bytes.  A block of threads takes
// neighbouring rows, whatever requests they belong to, so that the work is balanced by tokens.  One warp finds where they
// are (locate_rows.cuh), a row each lane: more warps that do so would queue for the same few ids.  Then all threads move the
// vectors of these rows, kVectorsPerThread loads in flight each, with those of the scales.
//
// On an H200 4096 tokens take 2.3 us, 65536 6.2 us, 93 % of a copy of as many bytes.  Fewer rows than half the SMs have blocks for
// are located after the wait alone: one token takes 1.5 us, not 1.7.
#include <algorithm>

#include "cache/gather_indexer_cache.h"
#include "cache/locate_rows.cuh"
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
  bool early;               // whether to prefetch rows before the wait
};

// kVector: what values move as.  Scales move as words, or byte by byte if values do.
template <class Vector>
__global__ void __launch_bounds__(kMaxThreads)
    gather_indexer_cache_kernel(const __grid_constant__ GatherIndexerPlan plan) {
  constexpr bool kBytes = sizeof(Vector) == 1;
  __shared__ const char *values_of[kMostRows], *scales_of[kMostRows];
  const int64_t first = int64_t{blockIdx.x} * plan.rows, left = plan.locate.num_rows() - first;
  const uint32_t rows = left < plan.rows ? static_cast<uint32_t>(left) : plan.rows;
  if (threadIdx.x < 32) {
    bool early = plan.early && comes_early();
    RowLocator::Seen seen;
    const RowLocator::Guess guess = plan.locate.guess(first, static_cast<int>(rows), !early);
    PagedRequests::Place place;
    if (!early) begin_dependent();
#pragma unroll 1
    for (;; early = false) {
      place = plan.locate(first, static_cast<int>(rows), guess, early, seen);
      const char* block = plan.cache + place.block * plan.block_bytes;
      values_of[threadIdx.x] = place.block < 0 ? nullptr : block + place.offset * plan.value_bytes;
      scales_of[threadIdx.x] = block + plan.scales_at + place.offset * plan.scale_bytes;
      if (!early) break;
      if (place.block >= 0) {
        prefetch(values_of[threadIdx.x], static_cast<uint32_t>(plan.value_bytes));
        prefetch(scales_of[threadIdx.x]);
      }
      begin_dependent();
      if (plan.locate.unchanged(guess, seen)) break;
    }
  } else {
    begin_dependent();
  }
  __syncthreads();

  uint32_t scale;
  char* scale_to;
  const auto load_scale = [&](uint32_t n) {
    uint32_t group;
    const uint32_t row = plan.groups(n, group);
    scale_to = nullptr;
    if (row >= rows || !values_of[row]) return;
    const char* from = scales_of[row] + 4 * group;
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
      if (!values_of[row]) continue;
      loaded[i] = load_vec<Vector>(values_of[row] + vector * sizeof(Vector));
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
  // Few blocks have as many threads as vectors, many as few as keep all blocks on the chip.
  const int64_t in_flight = blocks < 4 * num_sms(launch.device) ? 1 : kVectorsPerThread;
  const int64_t threads =
      std::clamp<int64_t>((rows * vectors + in_flight * 32 - 1) / (in_flight * 32) * 32, 32, kMaxThreads);
  if (blocks >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "too many rows for one call");
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
                               2 * blocks >= num_sms(launch.device)};
  launch_dependent(gather_indexer_cache_kernel<Vector>, static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads),
                   launch, "cp_gather_indexer_k_quant_cache", plan);
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
