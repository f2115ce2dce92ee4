// For each token t and each group g of Q elements: s = max(amax, 1e-4) / 448, values = e4m3(k[t, g] / s) and s itself into
// the token's two places of its block.
//
// Memory-bound: k is read and its bytes are written once; the floor is that traffic at copy bandwidth.  Two vectors of 16
// bytes of a group are one thread's, so that the amax of a group of a power of two elements is a few shuffles away (three
// for 128 of 16 bits), and what a division by the scale needs is worked out once for both.  Small threads, one token each, all
// of whose vectors are prefetched: 65536 tokens take 8.3 us on an H200, 8.8 by two tokens, 9.3 by four.  Other groups, strides
// and alignments are taken element by element.
#include <algorithm>
#include <bit>

#include "cache/indexer/indexer_k_quant_and_cache.h"
#include "cache/magnitude.cuh"
#include "cache/mover.cuh"
#include "cache/slot_map.cuh"
#include "cuda/dependent.cuh"

namespace pykv {
namespace {

constexpr char kOp[] = "indexer_k_quant_and_cache";
constexpr int kThreads = 128, kLaneVectors = 2;
constexpr uint32_t kEarlyBlocks = 4096;
constexpr uint32_t kWholeWarp = 0xffffffffu;

struct IndexerPlan {
  SlotMap map;
  const char* k;
  int64_t k_row, k_dim;  // bytes
  char* cache;
  int64_t block_bytes, scales_at;
  uint32_t values, groups, group_size;
  Divider pieces;       // of a token: vectors, or groups
  uint32_t lanes_log2;  // of a group
  IndexerScale scale;
};

__device__ float scale_from(float amax, IndexerScale kind) {
  const float scale = amax > 0x1.fffffep127f ? amax : fp8_unit(fmaxf(amax, IndexerBlock::kLeastMagnitude));
  return kind == IndexerScale::kFloat ? scale : power_of_two_from(scale);
}

// The four bytes of its place.
__device__ uint32_t stored_scale(float scale, IndexerScale kind) {
  const uint32_t bits = __float_as_uint(scale);
  return kind == IndexerScale::kExponent ? (bits >> 23) * 0x01010101u : bits;
}

// The largest word of all lanes of a group.  Whole warps call it.
template <class T>
__device__ uint32_t share_largest(uint32_t most, uint32_t lanes_log2) {
  for (uint32_t distance = (1u << lanes_log2) / 2; distance > 0; distance /= 2)
    most = larger<T>(most, __shfl_xor_sync(kWholeWarp, most, distance));
  return most;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    indexer_k_quant_kernel(const __grid_constant__ IndexerPlan plan, int64_t first_token) {
  constexpr int kElements = 16 / sizeof(T);
  using Codes = Mover<T, KvFormat::kE4M3, kElements>;
  using Loaded = typename Codes::Loaded;
  const uint32_t id = blockIdx.x * kThreads + threadIdx.x, lanes = 1u << plan.lanes_log2;
  uint32_t piece;
  const int64_t token = first_token + plan.pieces(id, piece);
  const uint32_t group = piece >> plan.lanes_log2, step = lanes * kElements;
  const uint32_t column = group * plan.group_size + (piece & (lanes - 1)) * kElements;
  const char* from = plan.k + token * plan.k_row + column * sizeof(T);
  const bool exists = token < plan.map.num_tokens;
  have_ready(from);
  if (comes_early(kEarlyBlocks) && exists) {
    plan.map.prefetch_slot(token);
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) prefetch(from + v * step * sizeof(T));
  }
  begin_dependent();

  const Slots<1> slots = plan.map.template load<1>(token, 1, plan.map.num_tokens);
  Loaded loaded[kLaneVectors];
#pragma unroll
  for (int v = 0; v < kLaneVectors; ++v) {
    loaded[v] = Loaded{};
    if (exists) loaded[v] = load_vec_in_order<Loaded>(from + v * step * sizeof(T));
  }
  const uint32_t most = share_largest<T>(largest_word(loaded), plan.lanes_log2);

  int64_t page;
  uint32_t offset;
  if (!plan.map.locate(plan.map.slot(slots, 0), page, offset)) return;
  const float scale = scale_from(largest_in_word<T>(most), plan.scale);
  const Quotient quotient(scale);
  char* block = plan.cache + page * plan.block_bytes;
  char* to = block + int64_t{offset} * plan.values + column;
#pragma unroll
  for (int v = 0; v < kLaneVectors; ++v) store_vec(to + v * step, Codes::convert(loaded[v], quotient));
  if ((piece & (lanes - 1)) == 0)
    reinterpret_cast<uint32_t*>(block + plan.scales_at)[int64_t{offset} * plan.groups + group] =
        stored_scale(scale, plan.scale);
}

// Any group: up to 32 lanes walk through it twice.
template <class T>
__global__ void __launch_bounds__(kThreads)
    indexer_k_quant_elements_kernel(const __grid_constant__ IndexerPlan plan, int64_t first_token) {
  begin_dependent();
  const uint32_t id = blockIdx.x * kThreads + threadIdx.x, lanes = 1u << plan.lanes_log2, lane = id & (lanes - 1);
  uint32_t group;
  const int64_t token = first_token + plan.pieces(id >> plan.lanes_log2, group);
  const bool exists = token < plan.map.num_tokens;
  const char* from = plan.k + token * plan.k_row + int64_t{group} * plan.group_size * plan.k_dim;
  const auto element = [&](uint32_t e) { return *reinterpret_cast<const T*>(from + e * plan.k_dim); };

  float amax = 0.0f;
  for (uint32_t e = lane; exists && e < plan.group_size; e += lanes) amax = fmaxf(amax, fabsf(to_float(element(e))));
  const uint32_t most = share_largest<float>(__float_as_uint(amax), plan.lanes_log2);

  int64_t page;
  uint32_t offset;
  if (!exists || !plan.map.locate(plan.map.slots[token], page, offset)) return;
  const float scale = scale_from(__uint_as_float(most), plan.scale);
  const Quotient quotient(scale);
  char* block = plan.cache + page * plan.block_bytes;
  char* to = block + int64_t{offset} * plan.values + int64_t{group} * plan.group_size;
  for (uint32_t e = lane; e < plan.group_size; e += lanes)
    to[e] = static_cast<char>(to_fp8<KvFormat::kE4M3>(element(e), quotient));
  if (lane == 0) {
    char* scale_to = block + plan.scales_at + 4 * (int64_t{offset} * plan.groups + group);
    for (int b = 0; b < 4; ++b) scale_to[b] = static_cast<char>(stored_scale(scale, plan.scale) >> (8 * b));
  }
}

// launch_some(first token, blocks) for as many tokens at a time as 31-bit numbers of threads allow.
template <class F>
void for_each_launch(int64_t num_tokens, int64_t threads_of_a_token, F&& launch_some) {
  const int64_t most = (int64_t{1} << 30) / threads_of_a_token + 1;
  for (int64_t first = 0; first < num_tokens; first += most) {
    const int64_t tokens = std::min(most, num_tokens - first);
    launch_some(first, static_cast<uint32_t>((tokens * threads_of_a_token + kThreads - 1) / kThreads));
  }
}

template <class T>
void launch_kernel(const IndexerKQuantArgs& args, const Launch& launch) {
  constexpr int64_t kSize = sizeof(T), kElements = 16 / kSize;
  const int64_t group_lanes = args.group_size / (kElements * kLaneVectors);
  IndexerPlan plan{slot_map_of(args.slots, args.num_tokens, args.num_blocks, args.block.block_size,
                               launch.reporter("indexer_k_quant_and_cache: slot_mapping")),
                   static_cast<const char*>(args.k),
                   args.k_row * kSize,
                   args.k_dim * kSize,
                   static_cast<char*>(args.cache),
                   args.block_bytes,
                   args.block.scales_at(),
                   static_cast<uint32_t>(args.block.values),
                   static_cast<uint32_t>(args.block.groups),
                   static_cast<uint32_t>(args.group_size),
                   Divider(),
                   0,
                   args.scale};
  const bool in_vectors = args.group_size % (kElements * kLaneVectors) == 0 &&
                          std::has_single_bit(static_cast<uint64_t>(group_lanes)) && group_lanes <= 32 &&
                          args.k_dim == 1 && is_aligned(16, args.k, {args.k_row * kSize}) &&
                          is_aligned(kElements, args.cache, {args.block_bytes});
  if (in_vectors) {
    const int64_t pieces = args.block.values / (kElements * kLaneVectors);
    plan.pieces = Divider(pieces);
    plan.lanes_log2 = static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(group_lanes)));
    return for_each_launch(args.num_tokens, pieces, [&](int64_t first, uint32_t blocks) {
      launch_dependent(indexer_k_quant_kernel<T>, blocks, kThreads, launch, kOp, plan, first);
    });
  }
  const int64_t lanes = std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(args.group_size, 32)));
  plan.pieces = Divider(args.block.groups);
  plan.lanes_log2 = static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(lanes)));
  for_each_launch(args.num_tokens, lanes * args.block.groups, [&](int64_t first, uint32_t blocks) {
    launch_dependent(indexer_k_quant_elements_kernel<T>, blocks, kThreads, launch, kOp, plan, first);
  });
}

}  // namespace

void indexer_k_quant_and_cache_cuda(const IndexerKQuantArgs& args, const Launch& launch) {
  if (args.block.values >= int64_t{1} << 25) fail(PYKV_NOT_IMPLEMENTED, "keys of 2^25 elements are not supported");
  if (args.block.block_size >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "blocks of 2^31 tokens are not supported");
  dispatch<half, bf16, float>(args.dtype, [&]<class T> { launch_kernel<T>(args, launch); });
}

}  // namespace pykv
