// The host side of paged attention on CUDA: which kernel takes which sequences, and the workspace.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "attention/paged_attention.h"
#include "attention/paged_attention_combine.cuh"
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

// If all sequences have about as few rows, as in decoding, one launch with tiles of that size takes them all.  (It would
// take any: this is a guess from the totals, the lengths being on the device.)
bool uniform_rows(int64_t num_tokens, int64_t num_seqs, int group, int head_size, RowClass& rows) {
  const auto fits = [&](int limit) { return group <= limit && num_tokens * group <= limit * num_seqs; };
  rows = fits(16) ? RowClass::kFew : head_size <= 128 ? RowClass::kSome : RowClass::kMany;
  if (fits(32)) return true;
  rows = RowClass::kMore;  // poor at single tokens: not for a mean
  return head_size <= 128 && fits(64) && num_tokens % num_seqs == 0;
}

// Of a call that has such a class.
RowClass uniform_rows(const Problem& p) {
  RowClass rows;
  uniform_rows(p.a.num_tokens, p.a.num_seqs, p.group, p.a.head_size, rows);
  return rows;
}

// With batch_invariant: tiles that all compute a row in the same steps.  Without it, where sequences are so short that they are
// mostly waits for their queries, tiles of 64 rows do better than those of 32 if four warps multiply together.
RowClass class_for(RowClass rows, bool batch_invariant, bool short_by_warpgroups, int head_size) {
  if (short_by_warpgroups && rows == RowClass::kSome) return RowClass::kMore;
  if (!batch_invariant) return rows;
  return rows == RowClass::kFew || head_size > 128 ? RowClass::kInvariantFew : RowClass::kInvariantMore;
}

// Can the tensor-core kernels take this call?  They want 16-byte pieces everywhere.
bool suits_mma(const PagedAttentionArgs& a) {
  if (a.dtype == DType::kFloat32 || a.head_size > 256) return false;
  const int bytes = a.kv_format == KvFormat::kSame ? 2 : 1;
  const auto whole = [&](int64_t elements) { return elements * bytes % 16 == 0; };
  const auto small = [&](int64_t elements) { return whole(elements) && elements >= 0 && elements < 1 << 29; };
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };

  const bool head = whole(a.head_size) && a.head_size % 8 == 0;
  const bool rows = aligned(a.query) && aligned(a.out) && a.query_token_stride % 8 == 0 &&
                    a.query_head_stride % 8 == 0 && a.out_token_stride % 8 == 0 && a.out_head_stride % 8 == 0;
  const bool key_chunks = a.key.chunk >= a.head_size || (a.key.chunk * bytes == 16 && small(a.key.chunk_stride));
  const bool key = aligned(a.key.data) && whole(a.key.block) && whole(a.key.token) && whole(a.key.head) && key_chunks;
  const bool value_rows = a.value.dim == 1 && whole(a.value.token);
  const bool value_columns = a.value.dim != 1 && a.value.token == 1 && small(a.value.dim) && whole(a.block_size);
  const bool value =
      aligned(a.value.data) && whole(a.value.block) && whole(a.value.head) && (value_rows || value_columns);
  return head && rows && key && value;
}

// Of these, the one for the call's kind of cache elements.
template <class F>
F* of_kind(const PagedAttentionArgs& a, F* f16, F* bf16, F* e4m3, F* e5m2, F* int8, F* nvfp4) {
  switch (a.kv_format) {
    case KvFormat::kE4M3:
      return e4m3;
    case KvFormat::kE5M2:
      return e5m2;
    case KvFormat::kInt8:
      return int8;
    case KvFormat::kNvfp4:
      return nvfp4;
    default:
      return a.dtype == DType::kFloat16 ? f16 : bf16;
  }
}

bool launch_decode(const Problem& p, const Launch& launch) {
  return of_kind(p.a, launch_decode_f16, launch_decode_bf16, launch_decode_e4m3, launch_decode_e5m2, launch_decode_int8,
                 launch_decode_nvfp4)(p, launch);
}

bool launch_tokens(const Problem& p, const Launch& launch) {
  return of_kind(p.a, launch_tokens_f16, launch_tokens_bf16, launch_tokens_e4m3, launch_tokens_e5m2, launch_tokens_int8,
                 launch_tokens_nvfp4)(p, launch);
}

bool launch_warpgroup_clusters(const Problem& p, const Launch& launch) {
  using Launcher = bool(const Problem&, const Launch&);
  return of_kind<Launcher>(p.a, launch_warpgroup_clusters_f16, launch_warpgroup_clusters_bf16,
                           launch_warpgroup_clusters_e4m3, launch_warpgroup_clusters_e5m2,
                           launch_warpgroup_clusters_int8, nullptr)(p, launch);
}

bool launch_warpgroups(const Problem& p, RowClass rows, const Launch& launch) {
  using Launcher = bool(const Problem&, RowClass, const Launch&);
  return of_kind<Launcher>(p.a, launch_warpgroups_f16, launch_warpgroups_bf16, launch_warpgroups_e4m3,
                           launch_warpgroups_e5m2, launch_warpgroups_int8, nullptr)(p, rows, launch);
}

bool has_17_to_64_rows(RowClass rows) { return rows == RowClass::kSome || rows == RowClass::kMore; }

// Several query rows of few KV heads, whose keys clusters share: more than 16 rows by warpgroups, for elsewhere elements of one byte
// are widened for few rows at a time.  False if the call had better go another way.
bool launch_for_few_heads(const Problem& p, RowClass rows, const Launch& launch) {
  const int device = launch.device;
  if (rows == RowClass::kFew) return suits_spans(p, 1, device) && launch_tokens(p, launch);
  if (!has_17_to_64_rows(rows)) return false;
  if (may_use_warpgroups(p.a, rows, device)) return suits_spans(p, 1, device) && launch_warpgroup_clusters(p, launch);
  const int ways = rows == RowClass::kMore ? 2 : 1;
  return p.a.kv_format == KvFormat::kSame && suits_spans(p, ways, device) && launch_tokens(p, launch);
}

// Clusters, and after them the line of warpgroups, of which one finds that the lengths are not for it.  False if the call had better
// go another way.
bool launch_either_way(Problem p, RowClass rows, const Launch& launch) {
  if (!may_go_either_way(p, rows, launch.device)) return false;
  p.lengths = Lengths::kForClusters;
  return (rows != RowClass::kFew && launch_warpgroup_clusters(p, launch)) || launch_tokens(p, launch);
}

bool launch_prefill(const Problem& p, const Launch& launch) {
  if (p.a.kv_format != KvFormat::kSame) return false;
  if (p.a.batch_invariant) {
    return p.a.dtype == DType::kFloat16 ? launch_exact_wgmma_f16(p, launch) : launch_exact_wgmma_bf16(p, launch);
  }
  return p.a.dtype == DType::kFloat16 ? launch_wgmma_f16(p, launch) : launch_wgmma_bf16(p, launch);
}

bool launch_mma(const Problem& p, RowClass rows, const Launch& launch) {
  const bool from_17_to_64 = has_17_to_64_rows(rows);
  const bool decodes = rows == RowClass::kFew || rows == RowClass::kInvariantFew;
  // Short calls are first asked for in launch_decode if they see all their keys; those of more rows in launch_warpgroup_clusters,
  // whose clusters know windows; and others in launch_tokens, whose clusters know sparsity, too.  Long ones with either are
  // launch_decode's, for its line knows them.  All over pages that are no groups of eight tokens are launch_tokens's, if clusters
  // of warpgroups have not taken them.
  if (decodes && p.sees_all() && launch_decode(p, launch)) return true;
  const bool by_warpgroups = may_use_warpgroups(p.a, rows, launch.device);
  if (launch_for_few_heads(p, rows, launch)) return true;
  if (launch_either_way(p, rows, launch)) return true;
  if (by_warpgroups && from_17_to_64 && launch_warpgroup_clusters(p, launch)) return true;
  if ((rows == RowClass::kFew || from_17_to_64) && launch_tokens(p, launch)) return true;
  if (decodes && !p.sees_all() && launch_decode(p, launch)) return true;
  if (by_warpgroups) return launch_warpgroups(p, rows, launch);
  return of_kind(p.a, launch_f16, launch_bf16, launch_e4m3, launch_e5m2, launch_int8, launch_nvfp4)(p, rows, launch);
}

void launch_all(Problem p, const Launch& launch) {
  constexpr int kAnyRows = 1 << 30;
  const auto take = [&](RowClass rows, int min_rows, int max_rows) {
    p.min_rows = min_rows;
    p.max_rows = max_rows;
    return launch_mma(p, rows, launch);
  };
  if (suits_mma(p.a)) {
    RowClass rows;
    constexpr int kShort = 256;  // keys
    const bool short_by_warpgroups = p.a.max_seq_len <= kShort && p.a.kv_format == KvFormat::kSame &&
                                     may_use_warpgroups(p.a, RowClass::kMore, launch.device);
    const auto class_of = [&](RowClass x) {
      return class_for(x, p.a.batch_invariant, short_by_warpgroups, p.a.head_size);
    };
    const RowClass many = class_of(RowClass::kMany);
    const auto take_many = [&](int min_rows) {
      p.min_rows = min_rows;
      p.max_rows = kAnyRows;
      return launch_prefill(p, launch) || launch_mma(p, many, launch);
    };
    if (uniform_rows(p.a.num_tokens, p.a.num_seqs, p.group, p.a.head_size, rows)) {
      if (take(class_of(rows), 0, kAnyRows)) return;
    } else if (p.group > 16 || p.a.num_seqs == 1) {
      if (take_many(0)) return;
    } else {
      if (take_many(16) && take(class_of(RowClass::kFew), 0, 16)) return;
    }
  }
  p.min_rows = 0;
  p.max_rows = kAnyRows;
  launch_simple(p, launch);
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

bool may_use_warpgroups(const PagedAttentionArgs& a, RowClass rows, int device) {
  const bool suits_rows = rows == RowClass::kFew || rows == RowClass::kSome || rows == RowClass::kMore;
  const bool suits_cache = a.kv_format != KvFormat::kNvfp4 && a.key.chunk >= a.head_size && a.value.dim == 1;
  return suits_rows && suits_cache && a.head_size <= 128 && a.sparse.vert_stride <= 1 && !a.batch_invariant &&
         has_warpgroups(device);
}

bool fills_warpgroups(const Problem& p, int device) {
  return p.sees_all() && may_use_warpgroups(p.a, RowClass::kFew, device) &&
         p.a.num_seqs * p.a.num_kv_heads >= num_sms(device);
}

bool suits_spans(const Problem& p, int ways, int device) {
  const bool is_long = p.a.max_seq_len > kMostOfFew && p.sees_all() && p.min_rows == 0 && p.lengths == Lengths::kAny;
  return is_long && p.a.num_seqs * p.a.num_kv_heads * ways * kFewestSpans * kMostBlocks <= num_sms(device);
}

bool may_go_either_way(const Problem& p, RowClass rows, int device) {
  const bool has_line = p.a.kv_format == KvFormat::kNvfp4
                            ? rows == RowClass::kFew && p.a.head_size == 128 && !p.a.batch_invariant
                            : may_use_warpgroups(p.a, rows, device);
  const bool is_wide = p.sees_all() && p.a.max_seq_len > kMostOfFew && has_line;
  const bool are_alike = p.min_rows == 0 && p.a.num_tokens % p.a.num_seqs == 0;  // the numbers of query tokens
  if (!is_wide || !are_alike || p.a.num_seqs * p.a.num_kv_heads > 2 * num_sms(device)) return false;
  // One sequence has clusters without a line, and one query token of few heads a line of decoding, whatever its pages are.
  const bool decodes = p.a.num_tokens == p.a.num_seqs && p.group <= (p.a.head_size <= 64 ? 4 : 8);
  return p.a.num_seqs == 1 ? rows == RowClass::kMore : !decodes;
}

void set_balance(Problem& p, int blocks_per_sm, int device) {
  if (p.lengths == Lengths::kAny) return;
  // Measured on an H100.  Arithmetic, of which one byte and 64 rows have most, is as slow for one block as for all.
  const bool narrow = p.a.kv_format != KvFormat::kSame, many = uniform_rows(p) == RowClass::kMore;
  const float pace = (narrow ? 1.3f : 2.f) * (many ? 0.75f : 1.f) / static_cast<float>(p.ways);
  const float blocks = static_cast<float>(p.cluster) / static_cast<float>(blocks_per_sm);
  int slack = narrow ? 1920 : 1280;
  if (p.a.batch_invariant) {  // the line has a long sequence in pieces of a chunk, which take a microsecond each
    slack = std::max(slack, (narrow ? 1700 : 900) * p.cluster) / (p.a.head_size > 128 ? 4 : 1);
  }
  p.balance = Balance::of(p.a.num_kv_heads, blocks, num_sms(device), pace, slack);
}

bool launch_for_other_lengths(Problem p, const Launch& launch) {
  if (p.lengths == Lengths::kAny) return true;
  p.lengths = Lengths::kForLine;
  if (p.a.batch_invariant) return launch_decode(p, launch);
  // Up to eight columns over one byte have a line that is quicker than that of warpgroups, and nvfp4 has no other.
  const bool is_nvfp4 = p.a.kv_format == KvFormat::kNvfp4, few = p.a.num_tokens / p.a.num_seqs * p.group <= 8;
  if (p.a.kv_format != KvFormat::kSame && (few || is_nvfp4) && launch_tokens(p, launch)) return true;
  return is_nvfp4 ? launch_nvfp4(p, uniform_rows(p), launch) : launch_warpgroups(p, uniform_rows(p), launch);
}

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
  p.lead = p.a.batch_invariant ? 0 : 1;
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

void combine(const Problem& p, int grid, const Launch& launch) {
  const int rows = (p.a.cu_query_lens.data ? p.tile_tokens : 1) * p.tile_heads;
  const int blocks = num_sms(launch.device) * (p.a.batch_invariant ? ExactQuad::kBlocksPerSm : Quad::kBlocksPerSm);
  dispatch<half, bf16, float>(p.a.dtype, [&]<class T> {
    launch_after(p.a.batch_invariant ? combine_kernel<T, ExactQuad> : combine_kernel<T, Quad>, dim3(blocks),
                 dim3(kCombineThreads), 1, 0, launch, p.a.op, p, grid, rows * (p.pitch / 4));
  });
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
    return std::max(simple, bytes(tiling_of(class_for(rows, batch_invariant, warpgroups, head_size), head_size)));
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
  if (p.sparse) {
    p.by_sparse_block = Divider(p.sparse_block);
    p.by_sparse_stride = Divider(p.sparse_stride);
    const int64_t stride = p.sparse_stride, step = args.sparse.sliding_step,
                  head_step = step < 0 ? -(step % stride) : 0;
    const int64_t rank = (args.sparse.tp_rank % stride + stride) % stride;
    p.sparse_head_shift = static_cast<int>(head_step);
    p.sparse_shift = static_cast<int>((rank * args.num_kv_heads % stride * head_step + 1) % stride);
  }
  p.block_size = Divider(args.block_size);

  const int64_t wanted =
      paged_attention_workspace_cuda(args.num_tokens, args.num_seqs, args.num_heads, args.num_kv_heads, args.head_size,
                                     args.batch_invariant, launch.device);
  if (args.workspace) {
    if (args.workspace_size < wanted) {
      fail(PYKV_VALUE_ERROR, "%s: workspace: %lld bytes are needed, got %lld", args.op, static_cast<long long>(wanted),
           static_cast<long long>(args.workspace_size));
    }
  } else {
    cuda_check(cudaMallocAsync(&p.a.workspace, wanted, stream_of(launch)), "paged_attention: workspace");
  }
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
