// Counting sort in one launch, by one block or, on sm_90, by clusters of blocks that send each other their counts.  All
// clusters count all pairs, and each places those of some warps.
//
// Each warp has a run of neighbouring pairs.
//   1. It counts its pairs in each bin, in a row of shared memory: its own, if it places them, else one for all warps before
//      those that do, or behind them.
//   2. Threads have a bin each: from counts to how many pairs of the bin lie in earlier rows, and of earlier blocks; then all bins
//      are added up, each padded.
//   3. It places its pairs, 32 at a time: lanes with the same bin (match_any) are placed in their order.
// So places depend on the pairs alone, whatever the number of warps and blocks.
//
// A warp sorts as many pairs as it has lanes by itself.
#include <algorithm>

#include "cuda/cluster.cuh"
#include "cuda/clusters_at_once.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/divider.cuh"
#include "moe/pair_experts.cuh"

namespace pykv {
namespace {

constexpr int kFewWarps = 16, kManyWarps = 32;        // of a block, at most
constexpr int kPortableBlocks = 8, kMostBlocks = 16;  // of a cluster: every chip that has them; some
constexpr int kClusters = 4;
constexpr int64_t kManyPairs = 8192;
constexpr int64_t kMaxShared = 96 << 10;  // bytes, of a block; every chip has as many
// Beside the counts of warps.
PYKV_HOST_DEVICE constexpr int64_t bin_words(int64_t num_bins) { return 4 * num_bins + kMostBlocks; }
constexpr int kLoads = 8;  // of shared memory, under way at once
constexpr int kKept = 4;   // pairs of a lane whose bins are looked up at once, and kept
constexpr uint32_t kAllLanes = 0xffffffffu;

struct SortPlan {
  SortPairsArgs args;
  Divider top_k, block_size;
  int32_t num_bins, num_listed;
  int32_t pair_warps;  // of a block: those that have pairs
  int32_t placing;     // of these, that place theirs: each cluster has others
  int32_t run;         // pairs of a warp
  int32_t bin_lanes;   // that write what there is of a bin
  int32_t log_ranks;   // blocks of a cluster, a power of 2
  int32_t ranks, clusters;
  Divider share;      // bins that a block of a cluster adds up
  bool ids_are_flat;  // pair p is at p * ids.stride
  PairExperts experts;
  Reporter sizes, adapters;
};

// Bins of this block, all in shared memory.
struct Bins {
  uint32_t* counts;  // [rows][num_bins]: of a warp that places its pairs, or of several others; then of the rows before
  uint32_t* of_ranks;  // [ranks][a share of the bins]: pairs of each block of the cluster
  uint2* found;        // [num_bins]: .x: where this block's pairs of the bin start in it; .y: pairs of all blocks
  uint32_t* begins;    // where the bin begins
};

// Rows of counts: those of warps before the ones that place, of each of these, of those behind.
__device__ __host__ inline int32_t rows_of(const SortPlan& plan) { return plan.placing + (plan.clusters > 1 ? 2 : 0); }
// Of this warp.
__device__ int32_t row_of_warp(const SortPlan& plan) {
  const auto warp = static_cast<int32_t>(threadIdx.x / 32),
             cluster = static_cast<int32_t>(blockIdx.x) >> plan.log_ranks;
  return min(max(warp - cluster * plan.placing, -1), plan.placing) + (plan.clusters > 1 ? 1 : 0);
}
__device__ bool places(const SortPlan& plan) {
  const auto warp = static_cast<int32_t>(threadIdx.x / 32),
             cluster = static_cast<int32_t>(blockIdx.x) >> plan.log_ranks;
  return static_cast<uint32_t>(warp - cluster * plan.placing) < static_cast<uint32_t>(plan.placing);
}

// The id of a pair; negative: it has none, or is not of this adapter.
__device__ int64_t id_of(const SortPlan& plan, uint32_t pair, int64_t adapter) {
  const SortPairsArgs& a = plan.args;
  int64_t at = pair * a.ids.stride;
  bool is_wanted = true;
  if (!plan.ids_are_flat || adapter >= 0) {
    uint32_t choice;
    const uint32_t token = plan.top_k(pair, choice);
    at = token * a.ids.token_stride + choice * a.ids.stride;
    is_wanted = adapter < 0 || a.token_adapters[token] == adapter;
  }
  const int64_t id = a.ids.at(at);
  return is_wanted ? id : -1;
}

// From ids to bins; -1: none.
template <int kSize>
__device__ void bins_of(const SortPlan& plan, const int64_t (&ids)[kSize], bool reports, int32_t (&bins)[kSize]) {
  const SortPairsArgs& a = plan.args;
  plan.experts.of(ids, reports, bins);
  if (!a.keeps_all) return;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const bool is_known = ids[i] >= 0 && ids[i] < a.num_experts;
    if (bins[i] < 0) bins[i] = is_known ? plan.num_listed + static_cast<int32_t>(ids[i]) : plan.num_bins - 1;
  }
}

__device__ int32_t bin_of(const SortPlan& plan, uint32_t pair, int64_t adapter, bool reports) {
  const int64_t ids[] = {id_of(plan, pair, adapter)};
  int32_t bins[1];
  bins_of(plan, ids, reports, bins);
  return bins[0];
}

__device__ uint32_t round_up(uint32_t n, const Divider& multiple) {
  uint32_t rest;
  multiple(n, rest);
  return rest ? n + multiple.d - rest : n;
}

// put(b, sum of value(0) ... value(b - 1)) for each bin, by the whole block; returns the sum of all.
template <class Value, class Put>
__device__ uint32_t add_up(int32_t num_bins, Value&& value, Put&& put) {
  __shared__ uint32_t sums[32];
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  uint32_t before = 0;
  for (int32_t first = 0; first < num_bins; first += blockDim.x) {
    const int32_t b = first + threadIdx.x;
    const uint32_t own = b < num_bins ? value(b) : 0;
    uint32_t sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t below = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += below;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    const uint32_t of_warp = lane < warps ? sums[lane] : 0;
    const uint32_t here = before + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
    before += __reduce_add_sync(kAllLanes, of_warp);
    if (b < num_bins) put(b, here + sum - own);
    __syncthreads();
  }
  return before;
}

// Sends words to the same place in block `rank`.
__device__ void send(const void* to, uint32_t x, int rank, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   cluster_address(shared_address(to), rank)),
               "r"(x), "r"(cluster_address(barrier, rank))
               : "memory");
#endif
}
__device__ void send(const void* to, uint2 x, int rank, uint32_t barrier) {
  cluster_send(cluster_address(shared_address(to), rank), float2{__uint_as_float(x.x), __uint_as_float(x.y)},
               cluster_address(barrier, rank));
}

// What blocks of a cluster tell each other: each adds up the counts of a share of the bins.
struct Exchange {
  uint64_t barriers[2];  // of counts, of what was found

  __device__ uint32_t counts() { return shared_address(&barriers[0]); }
  __device__ uint32_t found() { return shared_address(&barriers[1]); }

  static __device__ int32_t share(const SortPlan& plan) { return static_cast<int32_t>(plan.share.d); }
  static __device__ int32_t bins_of_rank(const SortPlan& plan, int32_t rank) {
    return max(min(share(plan), plan.num_bins - rank * share(plan)), 0);
  }

  // By one thread, before cluster_announce().
  __device__ void open(const SortPlan& plan) {
    cluster_open(counts());
    cluster_open(found());
    cluster_expect(counts(), bins_of_rank(plan, static_cast<int32_t>(blockIdx.x) & (plan.ranks - 1)) * plan.ranks * 4);
    cluster_expect(found(), plan.num_bins * 8);
  }

  __device__ void send_count(const SortPlan& plan, const Bins& bins, int32_t bin, uint32_t count) {
    const int32_t rank = static_cast<int32_t>(blockIdx.x) & (plan.ranks - 1);
    uint32_t of_share;
    const uint32_t to = plan.share(bin, of_share);
    send(&bins.of_ranks[rank * share(plan) + of_share], count, to, counts());
  }

  __device__ void add_up_share(const SortPlan& plan, const Bins& bins) {
    const int32_t share = Exchange::share(plan), rank = static_cast<int32_t>(blockIdx.x) & (plan.ranks - 1);
    const int32_t own = bins_of_rank(plan, rank);
    cluster_receive(counts());
    for (int32_t i = threadIdx.x; i / 32 * 32 < own * kMostBlocks; i += blockDim.x) {
      const int32_t of_share = i / kMostBlocks, of = i % kMostBlocks;
      const bool is_there = of_share < own && of < plan.ranks;
      const uint32_t count = is_there ? bins.of_ranks[of * share + of_share] : 0;
      uint32_t sum = count;
#pragma unroll
      for (int distance = 1; distance < kMostBlocks; distance *= 2) {
        const uint32_t below = __shfl_up_sync(kAllLanes, sum, distance, kMostBlocks);
        if (of >= distance) sum += below;
      }
      const uint32_t all = __shfl_sync(kAllLanes, sum, kMostBlocks - 1, kMostBlocks);
      if (is_there) send(&bins.found[rank * share + of_share], make_uint2(sum - count, all), of, found());
    }
  }
};

// Leaves in `bins` what is found of all pairs, and in `kept` the bins of some, and in `same` the lanes that have the same ones
// (in warps that place).
__device__ void count_pairs(const SortPlan& plan, const Bins& bins, Exchange& exchange, int64_t adapter, uint32_t first,
                            uint32_t end, int32_t (&kept)[kKept], uint32_t (&same)[kKept]) {
  int64_t ids[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const uint32_t p = first + 32 * i + threadIdx.x % 32;
    ids[i] = p < end ? id_of(plan, p, adapter) : -1;
  }
  bins_of(plan, ids, true, kept);
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (first + 32 * i + threadIdx.x % 32 >= end) kept[i] = -1;
  __syncthreads();  // counts are 0
  uint32_t* const counts = bins.counts + row_of_warp(plan) * plan.num_bins;
  const auto count = [&](int32_t bin) {
    if (bin >= 0) atomicAdd(&counts[bin], 1u);
  };
#pragma unroll
  for (const int32_t bin : kept) count(bin);
  for (uint32_t p = first + 32 * kKept + threadIdx.x % 32; p < end; p += 32) count(bin_of(plan, p, adapter, true));
  __syncthreads();
  if (plan.ranks > 1) cluster_wait();  // all blocks are there
  const int32_t rows = rows_of(plan);
  for (int32_t b = threadIdx.x; b < plan.num_bins; b += blockDim.x) {
    uint32_t sum = 0;
    for (int32_t first_row = 0; first_row < rows; first_row += kLoads) {
      uint32_t own[kLoads];  // all under way before the first is used
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        own[i] = first_row + i < rows ? bins.counts[(first_row + i) * plan.num_bins + b] : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first_row + i < rows) bins.counts[(first_row + i) * plan.num_bins + b] = sum;
        sum += own[i];
      }
    }
    if (plan.ranks > 1)
      exchange.send_count(plan, bins, b, sum);
    else
      bins.found[b] = make_uint2(0, sum);
  }
  __syncwarp();
  if (places(plan)) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) same[i] = __match_any_sync(kAllLanes, kept[i]);
  }
  if (plan.ranks > 1) {
    exchange.add_up_share(plan, bins);
    cluster_receive(exchange.found());
  }
}

__device__ void take_sizes(const SortPlan& plan, const Bins& bins) {
  const SortPairsArgs& a = plan.args;
  for (int32_t b = threadIdx.x; b < plan.num_bins; b += blockDim.x) {
    const int64_t size = a.sizes[b];
    if (size > a.rows_of_bin && blockIdx.x == 0) plan.sizes(size, a.rows_of_bin + 1);
    bins.found[b] = make_uint2(0, static_cast<uint32_t>(size < 0 ? 0 : size < a.rows_of_bin ? size : a.rows_of_bin));
  }
}

__device__ void place_pairs(const SortPlan& plan, const Bins& bins, int64_t adapter, int64_t list, uint32_t first,
                            uint32_t end, const int32_t (&kept)[kKept], const uint32_t (&same_of_kept)[kKept]) {
  const SortPairsArgs& a = plan.args;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t* before = bins.counts + row_of_warp(plan) * plan.num_bins;
  const auto place_group = [&](uint32_t p, int32_t bin, uint32_t same) {
    const int lower = __popc(same & ((1u << lane) - 1));
    const uint32_t place = bin >= 0 ? bins.found[bin].x + before[bin] + lower : 0;
    __syncwarp();
    if (bin >= 0 && lower == 0) before[bin] += __popc(same);
    __syncwarp();
    if (p >= end) return;
    if (a.places) a.places[p] = bin >= 0 ? static_cast<int32_t>(place) : a.dropped_place;
    if (bin < 0 || bin >= plan.num_listed) return;
    if (a.sorted) a.sorted[list * a.list_stride + place] = static_cast<int32_t>(p);
    if (a.sorted_tokens) {
      uint32_t choice;
      a.sorted_tokens[place] = static_cast<int32_t>(plan.top_k(p, choice));
    }
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (first + 32 * i < end) place_group(first + 32 * i + lane, kept[i], same_of_kept[i]);
  for (uint32_t from = first + 32 * kKept; from < end; from += 32) {
    const uint32_t p = from + lane;
    const int32_t bin = p < end ? bin_of(plan, p, adapter, false) : -1;
    place_group(p, bin, __match_any_sync(kAllLanes, bin));
  }
}

// All of at most 32 pairs, by the first warp; the others help with what stands where there are none.
__device__ void sort_few(const SortPlan& plan, int64_t adapter, int64_t list) {
  const SortPairsArgs& a = plan.args;
  const uint32_t lane = threadIdx.x, count = static_cast<uint32_t>(a.num_pairs);
  int32_t* const sorted = a.sorted ? a.sorted + list * a.list_stride : nullptr;
  int32_t* const blocks = a.blocks ? a.blocks + list * a.blocks_stride : nullptr;
  __shared__ int32_t bins[32];
  const int32_t bin = lane < count ? bin_of(plan, lane, adapter, true) : -1;
  if (a.offsets && lane < 32) bins[lane] = bin >= 0 ? bin : INT32_MAX;
  if (sorted)
    for (int64_t i = threadIdx.x; i < a.capacity; i += blockDim.x) sorted[i] = a.sentinel;
  if (blocks)
    for (int64_t i = threadIdx.x; i < a.num_blocks; i += blockDim.x) blocks[i] = -1;
  __syncthreads();
  if (a.offsets) {  // of blocks of one place each
    for (int32_t b = threadIdx.x; b <= plan.num_listed; b += blockDim.x) {
      int32_t before = 0;
#pragma unroll 8
      for (const int32_t other : bins) before += other < b;
      a.offsets[b] = before;
    }
  }
  if (lane >= 32) return;
  const uint32_t same = __match_any_sync(kAllLanes, bin);
  const uint32_t lower = __popc(same & ((1u << lane) - 1));
  const bool is_first = bin >= 0 && lower == 0;
  const uint32_t padded = is_first ? round_up(__popc(same), plan.block_size) : 0;
  uint32_t begin = 0;  // of the bin
#pragma unroll 8
  for (uint32_t other = 0; other < count; ++other) {
    const int32_t its_bin = __shfl_sync(kAllLanes, bin, other);
    const uint32_t its_size = __shfl_sync(kAllLanes, padded, other);
    begin += its_bin < bin ? its_size : 0;
  }
  const uint32_t taken = __reduce_add_sync(kAllLanes, padded);
  if (a.num_padded && lane == 0) a.num_padded[list * a.num_padded_stride] = static_cast<int32_t>(taken);
  if (lane >= count) return;
  const auto place = static_cast<int32_t>(begin + lower);
  if (a.places) a.places[lane] = bin >= 0 ? place : a.dropped_place;
  if (bin < 0) return;
  if (sorted) sorted[place] = static_cast<int32_t>(lane);
  uint32_t choice, rest;
  if (a.sorted_tokens) a.sorted_tokens[place] = static_cast<int32_t>(plan.top_k(lane, choice));
  if (blocks && is_first) {
    const uint32_t end = plan.block_size(begin + padded, rest);
    for (uint32_t i = plan.block_size(begin, rest); i < end; ++i) blocks[i] = bin;
  }
}

// What stands where there are no pairs and no bins, everywhere, by one block, before there is anything else.
__device__ void fill(const SortPlan& plan, int64_t list) {
  const SortPairsArgs& a = plan.args;
  if (a.sorted) {
    int32_t* const sorted = a.sorted + list * a.list_stride;
    const bool in_vectors = reinterpret_cast<uintptr_t>(sorted) % 16 == 0;
    const int64_t vectors = in_vectors ? a.capacity / 4 : 0;
    for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x)
      reinterpret_cast<int4*>(sorted)[i] = make_int4(a.sentinel, a.sentinel, a.sentinel, a.sentinel);
    for (int64_t i = vectors * 4 + threadIdx.x; i < a.capacity; i += blockDim.x) sorted[i] = a.sentinel;
  }
  if (a.blocks)
    for (int64_t i = threadIdx.x; i < a.num_blocks; i += blockDim.x) a.blocks[list * a.blocks_stride + i] = -1;
}

// A number for each thread of the grid, those of warps that place no pairs first: they are the first to be free.
__device__ uint32_t rank_of_thread(const SortPlan& plan) {
  const auto warps = static_cast<int32_t>(blockDim.x / 32),
             cluster = static_cast<int32_t>(blockIdx.x) >> plan.log_ranks;
  const int32_t from_free = static_cast<int32_t>(threadIdx.x / 32) - min((cluster + 1) * plan.placing, warps);
  return ((from_free < 0 ? from_free + warps : from_free) * gridDim.x + blockIdx.x) * 32 + threadIdx.x % 32;
}

// Everything but the pairs, shared out among the blocks.  filled: where fill() has been.
__device__ void put_bins(const SortPlan& plan, const Bins& bins, int64_t list, uint32_t taken, bool filled) {
  const SortPairsArgs& a = plan.args;
  const auto lanes = static_cast<uint32_t>(plan.bin_lanes);
  const uint32_t thread = rank_of_thread(plan), lane = thread % lanes;
  int32_t* const sorted = a.sorted ? a.sorted + list * a.list_stride : nullptr;
  uint32_t rest;
  if (sorted || a.blocks) {
    const auto step = static_cast<int32_t>(gridDim.x * blockDim.x / lanes);
    for (auto b = static_cast<int32_t>(thread / lanes); b < plan.num_listed; b += step) {
      const uint32_t begin = bins.begins[b], size = bins.found[b].y, padded = round_up(size, plan.block_size);
      if (sorted) {
        if (a.sizes.data)
          for (uint32_t i = lane; i < size; i += lanes) sorted[begin + i] = static_cast<int32_t>(b * a.rows_of_bin + i);
        for (uint32_t i = size + lane; i < padded && !filled; i += lanes) sorted[begin + i] = a.sentinel;
      }
      if (a.blocks && size) {
        const uint32_t first = plan.block_size(begin, rest);
        const uint32_t end = plan.block_size(begin + padded, rest);
        for (uint32_t i = first + lane; i < end; i += lanes) a.blocks[list * a.blocks_stride + i] = b;
      }
    }
  }
  // Behind the last bin.
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (sorted && !filled)
    for (int64_t i = int64_t{taken} + thread; i < a.capacity; i += threads) sorted[i] = a.sentinel;
  if (a.blocks && !filled)
    for (int64_t i = int64_t{plan.block_size(taken, rest)} + thread; i < a.num_blocks; i += threads)
      a.blocks[list * a.blocks_stride + i] = -1;
  if (a.num_padded && thread == 0) a.num_padded[list * a.num_padded_stride] = static_cast<int32_t>(taken);
  if (blockIdx.x != 0) return;
  for (int32_t b = threadIdx.x; b <= plan.num_listed; b += blockDim.x) {
    const uint32_t begin = b < plan.num_listed ? bins.begins[b] : taken;
    if (a.offsets) a.offsets[b] = static_cast<int32_t>(begin);
    if (a.wide_offsets) a.wide_offsets[b] = begin;
    if (b == plan.num_listed) break;
    if (a.problems1) put_problem(a.problems1 + 3 * b, bins.found[b].y, a.columns, a.hidden, a.is_swapped);
    if (a.problems2) put_problem(a.problems2 + 3 * b, bins.found[b].y, a.hidden, a.inner, a.is_swapped);
  }
  if (a.offsets_of_128) {
    const uint32_t all = add_up(
        plan.num_listed, [&](int32_t b) { return (bins.found[b].y + 127) / 128 * 128; },
        [&](int32_t b, uint32_t before) { a.offsets_of_128[b] = static_cast<int32_t>(before); });
    if (threadIdx.x == 0) a.offsets_of_128[plan.num_listed] = static_cast<int32_t>(all);
  }
}

// Whether the instance for what is usual may have the call: half of the code, which a block runs through but once.
bool is_usual(const SortPlan& plan) {
  const SortPairsArgs& a = plan.args;
  return !a.adapters.data && !a.sizes.data && !a.keeps_all && !a.expert_map.data && !a.ids.is_int64 &&
         a.ids.stride == 1 && plan.ids_are_flat && !a.wide_offsets && !a.offsets_of_128 && !a.problems1 && !a.problems2;
}

// The same, as the compiler is to know it.
template <bool kUsual>
__device__ decltype(auto) known(const SortPlan& given) {
  if constexpr (!kUsual) {
    return (given);  // a copy would lie in memory
  } else {
    SortPlan plan = given;
    plan.args.adapters.data = plan.args.sizes.data = plan.experts.map.data = nullptr;
    plan.args.keeps_all = plan.args.ids.is_int64 = false;
    plan.args.ids.stride = 1;
    plan.args.wide_offsets = nullptr;
    plan.args.offsets_of_128 = plan.args.problems1 = plan.args.problems2 = nullptr;
    plan.ids_are_flat = true;
    plan.num_bins = plan.num_listed;
    return plan;
  }
}

template <int kWarps, bool kUsual>
__global__ void __launch_bounds__(32 * kWarps, 1) sort_pairs_kernel(const __grid_constant__ SortPlan given) {
  extern __shared__ uint32_t shared[];
  __shared__ uint32_t taken_by_listed;
  const SortPlan& plan = known<kUsual>(given);
  const SortPairsArgs& a = plan.args;
  const int32_t n = plan.num_bins;
  const Bins bins{shared + bin_words(n), shared + 3 * n, reinterpret_cast<uint2*>(shared), shared + 2 * n};
  __shared__ Exchange exchange;
  if (plan.ranks > 1) {
    if (threadIdx.x == 0) exchange.open(plan);
    __syncwarp();
    cluster_announce();
  }
  const int32_t count_words = plan.pair_warps == 0 ? 0 : rows_of(plan) * n;
  for (int32_t i = threadIdx.x; i < count_words; i += blockDim.x) bins.counts[i] = 0;
  begin_dependent();

  int64_t adapter = -1, list = 0;
  if (a.adapters.data) {
    adapter = list = a.adapters[blockIdx.y];
    if (adapter >= a.max_adapters && blockIdx.x == 0 && threadIdx.x == 0) plan.adapters(adapter, a.max_adapters);
    if (adapter < 0 || adapter >= a.max_adapters || a.adapter_enabled[adapter] == 0) {  // for all of the cluster
      if (plan.ranks > 1) cluster_wait();
      return;
    }
  }
  if (plan.pair_warps == 0) return sort_few(plan, adapter, list);
  const int32_t warp = threadIdx.x / 32;
  const int64_t num_pairs = a.sizes.data || warp >= plan.pair_warps ? 0 : a.num_pairs;
  const int64_t begin = ((static_cast<int64_t>(blockIdx.x) & (plan.ranks - 1)) * plan.pair_warps + warp) * plan.run;
  const auto first = static_cast<uint32_t>(min(begin, num_pairs));
  const auto end = static_cast<uint32_t>(min(begin + plan.run, num_pairs));

  int32_t kept[kKept];
  uint32_t same[kKept];
  const bool filled = gridDim.x == 1 && !a.sizes.data;
  if (filled) fill(plan, list);
  if (a.sizes.data) {
    if (plan.ranks > 1) cluster_wait();
    take_sizes(plan, bins);
  } else {
    count_pairs(plan, bins, exchange, adapter, first, end, kept, same);
  }
  // A thread has found its bins itself; add_up() has barriers.
  const uint32_t all = add_up(
      n, [&](int32_t b) { return round_up(bins.found[b].y, plan.block_size); },
      [&](int32_t b, uint32_t before) {
        bins.begins[b] = before;
        bins.found[b].x += before;  // from here on where they lie
        if (b == plan.num_listed) taken_by_listed = before;
      });
  const uint32_t taken = n > plan.num_listed ? taken_by_listed : all;
  if (!a.sizes.data && places(plan)) place_pairs(plan, bins, adapter, list, first, end, kept, same);
  put_bins(plan, bins, list, taken, filled);
}

// Whether a cluster of kMostBlocks, each on a multiprocessor of its own, finds room.
template <auto kKernel, int kWarps>
bool has_room_for_most(const Launch& launch) {
  return clusters_at_once<kKernel>(launch, kMostBlocks, 32 * kWarps, kMaxShared) > 0;
}

// blocks: of a cluster, at most
template <int kWarps, bool kUsual>
void launch_blocks(SortPlan plan, uint32_t blocks, const Launch& launch) {
  constexpr auto kKernel = sort_pairs_kernel<kWarps, kUsual>;
  const SortPairsArgs& args = plan.args;
  const int64_t most_rows = (kMaxShared / 4 - bin_words(args.num_bins)) / std::max<int64_t>(args.num_bins, 1);
  if (most_rows < 1)
    fail(PYKV_NOT_IMPLEMENTED, "%lld bins of experts are more than shared memory holds",
         static_cast<long long>(args.num_bins));
  if (blocks > kPortableBlocks && !has_room_for_most<kKernel, kWarps>(launch)) blocks = kPortableBlocks;
  const int64_t groups = (args.num_pairs + 31) / 32;  // of 32 pairs
  plan.ranks = static_cast<int32_t>(blocks);
  plan.log_ranks = std::bit_width(blocks) - 1;
  plan.share = Divider((args.num_bins + blocks - 1) / blocks);
  plan.clusters = blocks > 1 && most_rows > 2 ? kClusters : 1;
  const int64_t most_warps = plan.clusters > 1 ? (most_rows - 2) * kClusters : most_rows;
  plan.pair_warps = static_cast<int32_t>(
      std::clamp<int64_t>((groups + blocks - 1) / blocks, 1, std::min<int64_t>(most_warps, kWarps)));
  plan.placing = (plan.pair_warps + plan.clusters - 1) / plan.clusters;
  const int64_t warps = static_cast<int64_t>(plan.pair_warps) * blocks;
  plan.run = static_cast<int32_t>((groups + warps - 1) / warps * 32);
  const int64_t threads = std::clamp(32 * plan.pair_warps, 256, 32 * kWarps);
  while (plan.bin_lanes > 1 && threads * blocks * plan.clusters / plan.bin_lanes < args.num_listed) plan.bin_lanes /= 2;
  const bool has_bins = (args.offsets && args.block_size != 1) || args.wide_offsets || args.offsets_of_128 ||
                        args.problems1 || args.problems2;
  if (blocks == 1 && args.num_pairs <= 32 && !args.sizes.data && !args.keeps_all && !has_bins)
    plan.pair_warps = 0;  // sort_few
  const auto bytes = static_cast<int>((rows_of(plan) * args.num_bins + bin_words(args.num_bins)) * 4);
  if (bytes > 48 << 10)
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "sort_pairs");
  const dim3 grid(blocks * static_cast<uint32_t>(plan.clusters),
                  args.adapters.data ? static_cast<uint32_t>(args.num_lists) : 1);
  launch_clusters(kKernel, grid, dim3(static_cast<uint32_t>(threads)), blocks, static_cast<size_t>(bytes), launch,
                  "sort_pairs", plan);
}

}  // namespace

void sort_pairs_cuda(const SortPairsArgs& args, const Launch& launch) {
  const SortPlan plan{args,
                      Divider(args.top_k),
                      Divider(args.block_size),
                      static_cast<int32_t>(args.num_bins),
                      static_cast<int32_t>(args.num_listed),
                      0,
                      0,
                      0,
                      32,
                      0,
                      1,
                      1,
                      {},
                      args.ids.token_stride == args.top_k * args.ids.stride || args.num_tokens <= 1,
                      PairExperts(args, launch),
                      launch.reporter(args.report_sizes),
                      launch.reporter(args.report_adapters)};
  // One block is the quickest where there is little to do.
  const bool is_large = args.num_pairs > 1024 || args.capacity > 16384;
  const uint32_t blocks = !is_large || !overlaps_kernels(launch.device) ? 1
                          : args.num_pairs > kManyPairs                 ? kMostBlocks
                                                                        : kPortableBlocks;
  // Few warps, while each keeps the bins of all its pairs: fewer counts to add up.
  const auto start = [&]<bool kUsual>() {
    if (args.num_pairs <= int64_t{32} * kKept * kFewWarps * blocks)
      launch_blocks<kFewWarps, kUsual>(plan, blocks, launch);
    else
      launch_blocks<kManyWarps, kUsual>(plan, blocks, launch);
  };
  if (is_usual(plan))
    start.template operator()<true>();
  else
    start.template operator()<false>();
}

}  // namespace pykv
