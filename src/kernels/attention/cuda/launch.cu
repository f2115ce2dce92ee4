// Paged attention on CUDA: from a plan to its launches.
#include <initializer_list>
#include <random>

#include "attention/cuda/elements.cuh"
#include "attention/cuda/launch.cuh"
#include "attention/cuda/merge/combine.cuh"
#include "attention/cuda/merge/exact.cuh"
#include "cuda/dependent.cuh"

namespace pykv::attention {

uint64_t next_ticket() {
  static std::atomic<uint64_t> next = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return next.fetch_add(2, std::memory_order_relaxed) | 1;  // never 0
}

namespace {

static_assert(sizeof(CutUnit) == kNoteBytes && sizeof(ExactQuad) == kExactQuadBytes && sizeof(Unit) == kUnitBytes);

// Nobody has taken an entry yet.
__global__ void clear_kernel(PrefillCounts* counts) {
  wait_for_previous_kernel();
  *counts = {0};
}

__global__ void __launch_bounds__(kCombineThreads, 4) combine_kernel(const __grid_constant__ LeftPieces left) {
  __shared__ JobsUpTo jobs_up_to;
  if (!takes_call(left.p)) return leave_call();
  // It lets no other come up: where the next kernel's blocks came to lie would depend on when which of these end, and what reads
  // neighbouring heads would no longer do so at the same time.
  wait_for_previous_kernel();
  combine_pieces(left, jobs_up_to);
}

int attribute(cudaDeviceAttr of, int device) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, of, device), "cudaDeviceGetAttribute");
  return value;
}

DeviceInfo ask_device(int device) {
  DeviceInfo d{};
  d.sms = num_sms(device);
  d.capability =
      attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 + attribute(cudaDevAttrComputeCapabilityMinor, device);
  d.has_warpgroups = has_warpgroups(device);
  d.shared_of_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  d.shared_of_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  d.threads_of_sm = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
  if (!d.overlaps_kernels()) return d;
  // Of a kernel that takes nothing but shared memory.
  cuda_check(cudaFuncSetAttribute(clear_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, d.shared_of_block),
             "shared memory");
  for (int of_sm = 1; of_sm <= 2; ++of_sm) {
    for (int blocks = 2; blocks <= kMostBlocks; ++blocks) {
      cudaLaunchAttribute size;
      size.id = cudaLaunchAttributeClusterDimension;
      size.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(blocks);
      config.blockDim = dim3(kThreads);
      config.dynamicSmemBytes = of_sm == 1 ? d.shared_of_block : d.shared_of_sm / 2 - 1024;
      config.attrs = &size;
      config.numAttrs = 1;
      int& clusters = d.clusters[of_sm - 1][blocks];
      if (cudaOccupancyMaxActiveClusters(&clusters, clear_kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        clusters = 0;
      }
    }
  }
  return d;
}

// How the rows of a KV head are divided into query tiles of at most so many.
void set_rows(Problem& p, int rows) {
  p.tile_heads = std::min(p.group, rows);
  p.by_tile_heads = Divider(p.tile_heads);
  p.head_tiles = (p.group + rows - 1) / rows;
  p.tile_tokens = rows / p.tile_heads;
  p.by_head_tiles = Divider(p.head_tiles);
  p.by_tile_tokens = Divider(p.tile_tokens);
  p.by_heads = Divider(p.a.num_kv_heads * p.head_tiles);
}

// Where a grid of so many blocks leaves pieces, two each.
void set_pieces(Problem& p, int grid, int rows, int pitch, int64_t at = 0) {
  p.rows = rows;
  p.pitch = pitch;
  char* memory = static_cast<char*>(p.a.workspace) + at;
  const WorkspacePlaces places = workspace_places(grid, rows, pitch, p.a.batch_invariant);
  p.tickets = reinterpret_cast<uint64_t*>(memory);
  p.partial_stats = reinterpret_cast<float2*>(memory + places.stats);
  p.partial = reinterpret_cast<float*>(memory + places.partial);
}

// The same call with two KV heads as one (decode/shape.cuh).  Its head size stays that of a head.
Problem fold(Problem p) {
  p.a.num_kv_heads /= 2;
  p.a.key.head *= 2;
  p.a.value.head *= 2;
  p.group *= 2;
  p.min_rows *= 2;
  p.max_rows = std::min(p.max_rows, 1 << 29) * 2;
  return p;
}

// The call as the step's kernel sees it.
Problem problem_of(const Problem& call, const Step& s) {
  Problem p = s.instance.folded ? fold(call) : call;
  p.min_rows = s.min_rows;
  p.max_rows = s.max_rows;
  p.lengths = s.lengths;
  p.balance = s.balance;
  p.ticket = next_ticket();
  p.mixed = s.mixed;
  if (s.kv_tile > 0) {
    p.kv_tile = s.kv_tile;
    p.place_tokens = p.a.batch_invariant ? kChunkTokens : s.kv_tile;
  }
  if (s.query_rows > 0) set_rows(p, s.query_rows);
  if (s.line.rows > 0) {
    p.lead = p.a.batch_invariant ? 0 : s.line.lead;
    p.by_grid = Divider(s.grid);
    set_pieces(p, s.grid, s.line.rows, s.line.pitch, s.pieces_at);
  }
  if (s.tile_tokens > 0) p.tile_tokens = s.tile_tokens;
  if (s.block_items > 0) {
    p.cluster = s.cluster;
    p.by_cluster = Divider(s.cluster);
    p.early_blocks = s.early_blocks;
    p.block_items = s.block_items;
    p.by_block_items = Divider(s.block_items);
    p.ways = s.ways;
    p.by_ways = Divider(s.ways);
    p.by_round = Divider(s.round_chunks);
    p.exchange_bytes = s.exchange_bytes;
  }
  if (s.spans > 1) {  // a block has one piece, where those of a line have two
    p.by_spans = Divider(s.spans);
    p.keys_alone = s.keys_alone;
    set_pieces(p, (s.grid + 1) / 2, s.instance.rows, s.pitch);
  }
  return p;
}

// What the blocks of a line leave for combine_kernel.
LeftPieces left_pieces(const Problem& p, const Step& s) {
  const int rows = (p.a.cu_query_lens.data ? p.tile_tokens : 1) * p.tile_heads;
  LeftPieces left{p, s.grid, rows * (p.pitch / 4)};
  if (s.instance.folded) left.p.a.kv_format = KvFormat::kSame;  // they have been multiplied by the scales of values
  return left;
}

// Of these, in the order of the names below, the one for the call's kind of cache elements.
LaunchOf* of_kind(const PagedAttentionArgs& a, std::initializer_list<LaunchOf*> launches) {
  const size_t i = a.kv_format == KvFormat::kSame ? a.dtype != DType::kFloat16 : 1 + static_cast<size_t>(a.kv_format);
  return i < launches.size() ? launches.begin()[i] : nullptr;
}

using F16 = Element16<half>;
using BF16 = Element16<bf16>;
using E4M3 = Element8<KvFormat::kE4M3>;
using E5M2 = Element8<KvFormat::kE5M2>;
using Int8 = Element8<KvFormat::kInt8>;
using Nvfp4 = ElementNvfp4;

LaunchOf* launch_of(KernelId kernel, const PagedAttentionArgs& a) {
  switch (kernel) {
    case KernelId::kMma:
    case KernelId::kMmaInvariant:
      return of_kind(a, {launch_mma<F16>, launch_mma<BF16>, launch_mma<E4M3>, launch_mma<E5M2>, launch_mma<Int8>,
                         launch_mma<Nvfp4>});
    case KernelId::kVerifyLine:
      return of_kind(
          a, {launch_verify<F16>, launch_verify<BF16>, launch_verify<E4M3>, launch_verify<E5M2>, launch_verify<Int8>});
    case KernelId::kVerifyBlock:
    case KernelId::kVerifyCluster:
    case KernelId::kVerifySpans:
      return of_kind(a, {launch_verify_clusters<F16>, launch_verify_clusters<BF16>, launch_verify_clusters<E4M3>});
    case KernelId::kTokensLine:
    case KernelId::kTokensCluster:
    case KernelId::kTokensSpans:
    case KernelId::kTokensEither:
    case KernelId::kSmallPagesLine:
    case KernelId::kSmallPagesCluster:
      return of_kind(
          a, {launch_tokens<F16>, launch_tokens<BF16>, launch_tokens<E4M3>, nullptr, nullptr, launch_tokens<Nvfp4>});
    case KernelId::kPrefill:
      return of_kind(a, {launch_prefill<F16>, launch_prefill<BF16>});
    case KernelId::kPrefillInvariant:
      return of_kind(a, {launch_prefill_invariant<F16>, launch_prefill_invariant<BF16>});
    default:
      return of_kind(a, {launch_decode<F16>, launch_decode<BF16>, launch_decode<E4M3>, launch_decode<E5M2>,
                         launch_decode<Int8>, launch_decode<Nvfp4>});
  }
}

}  // namespace

void fail_without_instance(const Problem& p, const Step& s) {
  fail(PYKV_RUNTIME_ERROR, "%s: there is no kernel %s<%d, %d> for this cache", p.a.op, name_of(s.instance.kernel),
       s.instance.head_size, s.instance.rows);
}

const DeviceInfo& device_info(int device) {
  constexpr int kDevices = 64;
  static std::atomic<const DeviceInfo*> known[kDevices];
  num_sms(device);  // fails if there are not so many devices
  const DeviceInfo* info = known[device].load(std::memory_order_acquire);
  if (!info) {  // another thread may find out the same: one of them is kept, for good
    const auto* found = new DeviceInfo(ask_device(device));
    if (known[device].compare_exchange_strong(info, found)) {
      info = found;
    } else {
      delete found;
    }
  }
  return *info;
}

void clear_counts(PrefillCounts* counts, const Launch& launch, const char* op) {
  Step clear{};
  clear.grid = clear.threads = clear.cluster = 1;
  launch_after(clear_kernel, clear, launch, op, counts);
}

void launch_plan(const Plan& plan, const Problem& call, const Launch& launch) {
  LeftPieces left{};
  for (int i = 0; i < plan.count; ++i) {
    const Step& s = plan.steps[i];
    const KernelId kernel = s.instance.kernel;
    if (kernel == KernelId::kClear) continue;  // with prefill
    if (kernel == KernelId::kCombine) {
      launch_after(combine_kernel, s, launch, call.a.op, left);
      continue;
    }
    const Problem p = problem_of(call, s);
    LaunchOf* launch_it = kernel == KernelId::kSimple ? launch_simple : launch_of(kernel, p.a);
    if (!launch_it) fail_without_instance(p, s);
    launch_it(p, s, launch);
    if (kernel == KernelId::kVerifyLine) left = left_pieces(p, s);
  }
}

}  // namespace pykv::attention
