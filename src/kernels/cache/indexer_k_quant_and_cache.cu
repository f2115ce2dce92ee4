// For each token t and each group g of Q elements: s = max(amax, 1e-4) / 448, values = e4m3(k[t, g] / s) and s itself into
// the token's two places of its block.
//
// Memory-bound: k is read and its bytes are written once; the floor is that traffic at copy bandwidth.  Two vectors of 16
// bytes of a group are one thread's, so that the amax of a group of a power of two elements is a few shuffles away (three
// for 128 of 16 bits), and what a division by the scale needs is worked out once for both.  A thread does this for two
// neighbouring tokens at once, all loads in flight together, or for one where that would leave SMs without work.  Other
// groups, strides and alignments are taken element by element.
#include <algorithm>
#include <bit>

#include "cache/indexer_k_quant_and_cache.h"
#include "cache/magnitude.cuh"
#include "cache/mover.cuh"
#include "cache/slot_map.cuh"
#include "cuda/dependent.cuh"

namespace pykv {
namespace {

constexpr char kOp[] = "indexer_k_quant_and_cache";
constexpr int kThreads = 128, kMostTokens = 2, kLaneVectors = 2;
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
  bool power_of_two;
};

__device__ float scale_from(float amax, bool power_of_two) {
  const float scale = amax > 0x1.fffffep127f ? amax : fp8_unit(fmaxf(amax, IndexerBlock::kLeastMagnitude));
  // rounded up: a carry out of the mantissa, unless that is 0; infinity stays what it is
  return power_of_two ? __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u) : scale;
}

// The largest words of all lanes of a group, for each of several groups.  Whole warps call it.
template <class T, int kTokens>
__device__ void share_largest(uint32_t (&most)[kTokens], uint32_t lanes_log2) {
  for (uint32_t distance = (1u << lanes_log2) / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) most[i] = larger<T>(most[i], __shfl_xor_sync(kWholeWarp, most[i], distance));
  }
}

template <class T, int kTokens>
__global__ void __launch_bounds__(kThreads)
    indexer_k_quant_kernel(const __grid_constant__ IndexerPlan plan, int64_t first_token) {
  constexpr int kElements = 16 / sizeof(T);
  using Codes = Mover<T, KvFormat::kE4M3, kElements>;
  using Loaded = typename Codes::Loaded;
  const uint32_t id = blockIdx.x * kThreads + threadIdx.x, lanes = 1u << plan.lanes_log2;
  uint32_t piece;
  const int64_t first = first_token + int64_t{plan.pieces(id, piece)} * kTokens;
  const uint32_t group = piece >> plan.lanes_log2, step = lanes * kElements;
  const uint32_t column = group * plan.group_size + (piece & (lanes - 1)) * kElements;
  const char* from = plan.k + first * plan.k_row + column * sizeof(T);
  have_ready(from);
  if (comes_early()) {
    plan.map.prefetch_slot(first);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
#pragma unroll
      for (int v = 0; v < kLaneVectors; ++v)
        if (first + i < plan.map.num_tokens) prefetch(from + i * plan.k_row + v * step * sizeof(T));
  }
  begin_dependent();

  const Slots<kTokens> slots = plan.map.template load<kTokens>(first, 1, plan.map.num_tokens);
  Loaded loaded[kTokens][kLaneVectors];
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      loaded[i][v] = Loaded{};
      if (first + i < plan.map.num_tokens)
        loaded[i][v] = load_vec_in_order<Loaded>(from + i * plan.k_row + v * step * sizeof(T));
    }

  uint32_t most[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) most[i] = largest_word(loaded[i]);
  share_largest<T>(most, plan.lanes_log2);

#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    int64_t page;
    uint32_t offset;
    if (!plan.map.locate(plan.map.slot(slots, i), page, offset)) continue;
    const float scale = scale_from(largest_in_word<T>(most[i]), plan.power_of_two);
    const Quotient quotient(scale);
    char* block = plan.cache + page * plan.block_bytes;
    char* to = block + int64_t{offset} * plan.values + column;
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) store_vec(to + v * step, Codes::convert(loaded[i][v], quotient));
    if ((piece & (lanes - 1)) == 0)
      reinterpret_cast<float*>(block + plan.scales_at)[int64_t{offset} * plan.groups + group] = scale;
  }
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
  uint32_t most[1] = {__float_as_uint(amax)};
  share_largest<float>(most, plan.lanes_log2);

  int64_t page;
  uint32_t offset;
  if (!exists || !plan.map.locate(plan.map.slots[token], page, offset)) return;
  const float scale = scale_from(__uint_as_float(most[0]), plan.power_of_two);
  const Quotient quotient(scale);
  char* block = plan.cache + page * plan.block_bytes;
  char* to = block + int64_t{offset} * plan.values + int64_t{group} * plan.group_size;
  for (uint32_t e = lane; e < plan.group_size; e += lanes)
    to[e] = static_cast<char>(to_fp8<KvFormat::kE4M3>(element(e), quotient));
  if (lane == 0) {
    char* scale_to = block + plan.scales_at + 4 * (int64_t{offset} * plan.groups + group);
    for (int b = 0; b < 4; ++b) scale_to[b] = static_cast<char>(__float_as_uint(scale) >> (8 * b));
  }
}

// launch_some(first token, blocks) for as many tokens at a time as 31-bit numbers of threads allow.
template <class F>
void for_each_launch(int64_t num_tokens, int64_t threads_of_a_step, int tokens_of_a_step, F&& launch_some) {
  const int64_t most = ((int64_t{1} << 30) / threads_of_a_step + 1) * tokens_of_a_step;
  for (int64_t first = 0; first < num_tokens; first += most) {
    const int64_t steps = (std::min(most, num_tokens - first) + tokens_of_a_step - 1) / tokens_of_a_step;
    launch_some(first, static_cast<uint32_t>((steps * threads_of_a_step + kThreads - 1) / kThreads));
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
                   args.power_of_two};
  const bool in_vectors = args.group_size % (kElements * kLaneVectors) == 0 &&
                          std::has_single_bit(static_cast<uint64_t>(group_lanes)) && group_lanes <= 32 &&
                          args.k_dim == 1 && is_aligned(16, args.k, {args.k_row * kSize}) &&
                          is_aligned(kElements, args.cache, {args.block_bytes});
  if (in_vectors) {
    const int64_t pieces = args.block.values / (kElements * kLaneVectors);
    plan.pieces = Divider(pieces);
    plan.lanes_log2 = static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(group_lanes)));
    const bool few = args.num_tokens * pieces < int64_t{kMostTokens} * kThreads * num_sms(launch.device);
    return dispatch_bool(few, [&]<bool kFew> {
      constexpr int kTokens = kFew ? 1 : kMostTokens;
      for_each_launch(args.num_tokens, pieces, kTokens, [&](int64_t first, uint32_t blocks) {
        launch_dependent(indexer_k_quant_kernel<T, kTokens>, blocks, kThreads, launch, kOp, plan, first);
      });
    });
  }
  const int64_t lanes = std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(args.group_size, 32)));
  plan.pieces = Divider(args.block.groups);
  plan.lanes_log2 = static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(lanes)));
  for_each_launch(args.num_tokens, lanes * args.block.groups, 1, [&](int64_t first, uint32_t blocks) {
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
