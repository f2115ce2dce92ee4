// The host side of paged attention on CUDA: the call, its workspace, and what its kernels have in common.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "attention/paged_attention.h"
#include "attention/paged_attention_combine.cuh"
#include "attention/paged_attention_exact.cuh"
#include "attention/paged_attention_launch.cuh"
#include "attention/paged_attention_plan.cuh"
#include "attention/paged_attention_wgmma_tiles.cuh"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace pykv {
namespace attention {
namespace {

constexpr int64_t kAlignment = 256;
int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int grid_of(int blocks_per_sm, int device) { return std::min(kMaxGrid, num_sms(device) * blocks_per_sm); }

// Where things lie in a workspace; notes come first.
struct Places {
  int64_t stats, partial, end;
};

Places places_of(int grid, const Tiling& t, bool batch_invariant) {
  const int64_t rows = int64_t{2} * grid * t.rows, quads = rows * (t.pitch / 4);
  const int64_t stats = align(grid * sizeof(Unfinished));
  if (batch_invariant) return {stats, stats, stats + align(quads * sizeof(ExactQuad))};  // with statistics of their own
  const int64_t partial = stats + align(rows * sizeof(float2));
  return {stats, partial, partial + align(quads * sizeof(float4))};
}

int64_t bytes_of(const Tiling& t, bool batch_invariant, int device) {
  return places_of(grid_of(t.blocks_per_sm, device), t, batch_invariant).end;
}

struct ReportNames {
  const char *op, *block_tables, *seq_lens, *cu_query_lens;
};

const ReportNames& report_names(const char* op) {
  static constexpr ReportNames kNames[] = {
      {"paged_attention", "paged_attention: block_tables", "paged_attention: seq_lens",
       "paged_attention: cu_query_lens"},
      {"paged_attention_v1", "paged_attention_v1: block_tables", "paged_attention_v1: seq_lens", ""},
      {"paged_attention_v2", "paged_attention_v2: block_tables", "paged_attention_v2: seq_lens", ""},
  };
  for (const ReportNames& names : kNames) {
    if (std::strcmp(names.op, op) == 0) return names;
  }
  return kNames[0];
}

// Where a grid of so many blocks leaves pieces, two each.
void set_pieces(Problem& p, const Tiling& t, int grid) {
  p.rows = t.rows;
  p.pitch = t.pitch;
  char* memory = static_cast<char*>(p.a.workspace);
  const Places places = places_of(grid, t, p.a.batch_invariant);
  p.unfinished = reinterpret_cast<Unfinished*>(memory);
  p.partial_stats = reinterpret_cast<float2*>(memory + places.stats);
  p.partial = reinterpret_cast<float*>(memory + places.partial);
}

}  // namespace

uint64_t next_ticket() {
  static std::atomic<uint64_t> next = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return next.fetch_add(2, std::memory_order_relaxed) | 1;  // never 0
}

int count_resident_blocks(const void* kernel, int threads, size_t shared_bytes) {
  int blocks = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes), "occupancy");
  return std::max(1, blocks);
}

int count_resident_clusters(const void* kernel, int blocks, int threads, size_t shared_bytes, const Launch& launch) {
  int clusters = 0;
  if (shared_bytes > shared_memory_limit(launch.device)) return 0;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_memory_limit(launch.device))),
             "shared memory");
  if (blocks == 1) {
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, threads, shared_bytes), "occupancy");
    return clusters * num_sms(launch.device);
  }
  if (!overlaps_kernels(launch.device)) return 0;
  cudaLaunchAttribute size;
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &size;
  config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    clusters = 0;
  }
  return clusters;
}

void set_rows(Problem& p, int rows) {
  p.tile_heads = std::min(p.group, rows);
  p.by_tile_heads = Divider(p.tile_heads);
  p.head_tiles = (p.group + rows - 1) / rows;
  p.tile_tokens = rows / p.tile_heads;
  p.by_head_tiles = Divider(p.head_tiles);
  p.by_tile_tokens = Divider(p.tile_tokens);
}

// For so many segments, if each sequence has one query tile.
LineBlocks line_blocks(int blocks, int64_t segments) {
  const int64_t of_block = std::max<int64_t>((segments + blocks - 1) / blocks, 1), fewer = segments / of_block;
  const bool has_whole = fewer * of_block == segments && fewer * 16 >= int64_t{blocks} * 15;
  return {Divider(blocks), Divider(has_whole ? fewer : 1), has_whole};
}

void set_places(Problem& p, int unit_tokens) {
  p.kv_tile = unit_tokens;
  p.place_tokens = p.a.batch_invariant ? kChunkTokens : unit_tokens;
}

int set_tiling(Problem& p, const Tiling& t, int blocks_per_sm, int device) {
  const int grid = grid_of(std::min(blocks_per_sm, t.blocks_per_sm), device);
  set_line(p, t, grid);
  return grid;
}

void set_line(Problem& p, const Tiling& t, int grid) {
  p.lead = p.a.batch_invariant ? 0 : t.lead;
  p.by_grid = Divider(grid);
  set_rows(p, t.tile_rows > 0 ? t.tile_rows : t.rows);
  const int heads = p.a.num_kv_heads * p.head_tiles;
  p.by_heads = Divider(heads);
  p.line = line_blocks(grid, p.a.num_seqs * heads);
  p.line_of_head = line_blocks(std::max(grid / heads, 1), p.a.num_seqs);
  set_pieces(p, t, grid);
}

void set_spans(Problem& p, int spans, int clusters, int columns, int pitch) {
  p.by_spans = Divider(spans);
  p.ticket = next_ticket();
  const int blocks = clusters * p.cluster;  // with a piece each, where those of a line have two
  set_pieces(p, {columns, pitch, 1}, (blocks + 1) / 2);
}

void set_cluster(Problem& p, int blocks, int queries, int head_size, int device) {
  p.cluster = blocks;
  p.by_cluster = Divider(blocks);
  const bool may_be_short = p.a.max_seq_len <= 2048 || p.lengths == Lengths::kForClusters;
  const bool early = overlaps_kernels(device) && (blocks <= 2 || may_be_short);
  p.early_blocks = early ? 4 * num_sms(device) : 0;
  p.block_items = (queries * (head_size / 4) + blocks - 1) / blocks;
  p.by_block_items = Divider(p.block_items);
}

LeftPieces left_pieces(const Problem& p, int grid) {
  const int rows = (p.a.cu_query_lens.data ? p.tile_tokens : 1) * p.tile_heads;
  return {p, grid, rows * (p.pitch / 4)};
}

void combine(const LeftPieces& left, const Launch& launch) {
  const bool exact = left.p.a.batch_invariant;
  const int blocks = num_sms(launch.device) * (exact ? ExactQuad::kBlocksPerSm : Quad::kBlocksPerSm);
  launch_after({exact ? KernelId::kCombineInvariant : KernelId::kCombine},
               exact ? combine_kernel<ExactQuad> : combine_kernel<Quad>, dim3(blocks), dim3(kCombineThreads), 1, 0,
               launch, left.p.a.op, left);
}

size_t shared_memory_limit(int device) {
  int bytes = 0;
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory size");
  return bytes;
}

}  // namespace attention

int64_t paged_attention_workspace_cuda(int64_t num_tokens, int64_t num_seqs, int num_heads, int num_kv_heads,
                                       int head_size, bool batch_invariant, int device) {
  using namespace attention;
  const auto bytes = [&](const Tiling& tiling) { return bytes_of(tiling, batch_invariant, device); };
  const int64_t simple = bytes(simple_tiling(head_size));
  RowClass rows;
  if (uniform_rows(num_tokens, num_seqs, num_heads / num_kv_heads, head_size, rows)) {
    const bool warpgroups = head_size <= 128 && !batch_invariant && has_warpgroups(device);  // for all the sizes tell
    const RowClass tiles = class_for(rows, batch_invariant, warpgroups, head_size);
    return std::max({simple, bytes(tiling_of(tiles, head_size)), bytes(mma_tiling(tiles, head_size))});
  }
  const RowClass many = class_for(RowClass::kMany, batch_invariant, false, head_size);
  const int64_t wanted = std::max({simple, bytes(few_rows_tiling(head_size)), bytes(tiling_of(many, head_size))});
  // Prefill on Hopper has the same records in fewer, longer tiles, and keeps sums beside them.
  const bool keeps = batch_invariant && head_size <= 128 && has_warpgroups(device);
  return keeps ? wanted + grid_of(1, device) * kept_bytes(head_size) : wanted;
}

void paged_attention_cuda(const PagedAttentionArgs& args, const Launch& launch) {
  using namespace attention;
  if (args.num_tokens == 0 || args.num_seqs == 0) return;

  Problem p{};
  p.a = args;
  const ReportNames& names = report_names(args.op);
  p.bad_block = launch.reporter(names.block_tables);
  p.bad_length = launch.reporter(names.seq_lens);
  p.bad_query = launch.reporter(names.cu_query_lens);
  p.a.max_seq_len = std::min({args.max_seq_len, args.max_blocks_per_seq * args.block_size, int64_t{kNoWindow}});
  p.group = args.num_heads / args.num_kv_heads;
  p.ways = 1;
  // One that can hide nothing is none.
  const bool hides = args.window > 0 && (args.window < p.a.max_seq_len || (!args.causal && args.cu_query_lens.data));
  p.window = static_cast<int>(hides ? std::min(args.window, int64_t{kNoWindow}) : kNoWindow);
  p.softcap_rate = args.softcap == 0 ? 0.f : 2 * kLog2e / args.softcap;
  p.plain_logits = args.softcap == 0 && args.alibi_slopes == nullptr && args.scale > 0;
  const auto small = [](int64_t x) { return static_cast<int>(std::clamp(x, int64_t{0}, int64_t{kNoWindow})); };
  p.sparse = args.sparse.vert_stride > 1;
  p.sparse_block = small(args.sparse.block_size);
  p.sparse_stride = small(args.sparse.vert_stride);
  p.sparse_local = small(args.sparse.local_blocks);
  p.block_size = Divider(args.block_size);

  const int64_t wanted =
      paged_attention_workspace_cuda(args.num_tokens, args.num_seqs, args.num_heads, args.num_kv_heads, args.head_size,
                                     args.batch_invariant, launch.device);
  if (args.workspace) {
    if (args.workspace_size < wanted) {
      fail(PYKV_VALUE_ERROR, "%s: workspace: %lld bytes are needed, got %lld", args.op, static_cast<long long>(wanted),
           static_cast<long long>(args.workspace_size));
    }
  } else if (!only_plans()) {
    cuda_check(cudaMallocAsync(&p.a.workspace, wanted, stream_of(launch)), "paged_attention: workspace");
  }
  note_workspace(wanted);
  void* allocated = args.workspace ? nullptr : p.a.workspace;
  try {
    launch_all(p, launch);
  } catch (...) {
    if (allocated) cudaFreeAsync(allocated, stream_of(launch));
    throw;
  }
  if (allocated) cuda_check(cudaFreeAsync(allocated, stream_of(launch)), "paged_attention: workspace");
}

}  // namespace pykv
