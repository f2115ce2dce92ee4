// For each token t and each group g of Q elements: s = max(amax, 1e-4) / 448, values = e4m3(k[t, g] / s) and s itself into
// the token's two places of its block.
//
// Memory-bound: k is read and its bytes are written once; the floor is that traffic at copy bandwidth.  16 bytes of a token
// are one thread's, so that the amax of a group of a power of two elements is a few shuffles away (four for 128 of 16
// bits).  A thread does this for four neighbouring tokens at once, all loads in flight together, or for one where that
// would leave SMs without work.  Other groups, strides and alignments are taken element by element.
#include <algorithm>
#include <bit>

#include "cache/indexer_k_quant_and_cache.h"
#include "cache/mover.cuh"
#include "cache/slot_map.cuh"
#include "cuda/dependent.cuh"

namespace pykv {
namespace {

constexpr char kOp[] = "indexer_k_quant_and_cache";
constexpr int kThreads = 128, kMostTokens = 4;
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
  const float scale = __fdiv_rn(fmaxf(amax, IndexerBlock::kLeastMagnitude), IndexerBlock::kLargest);
  // rounded up: a carry out of the mantissa, unless that is 0; infinity stays what it is
  return power_of_two ? __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u) : scale;
}

// The largest of all lanes of a group, for each of several groups.  Whole warps call it.
template <int kTokens>
__device__ void share_largest(float (&most)[kTokens], uint32_t lanes_log2) {
  for (uint32_t distance = (1u << lanes_log2) / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(kWholeWarp, most[i], distance));
  }
}

template <class T, int kTokens>
__global__ void __launch_bounds__(kThreads)
    indexer_k_quant_kernel(const __grid_constant__ IndexerPlan plan, int64_t first_token) {
  constexpr int kElements = 16 / sizeof(T);
  using Codes = Mover<T, KvFormat::kE4M3, kElements>;
  using Loaded = typename Codes::Loaded;
  begin_dependent();
  const uint32_t id = blockIdx.x * kThreads + threadIdx.x;
  uint32_t vector;
  const int64_t first = first_token + int64_t{plan.pieces(id, vector)} * kTokens;
  const char* from = plan.k + vector * 16;

  Loaded loaded[kTokens];
  int64_t slots[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    loaded[i] = Loaded{};
    if (first + i < plan.map.num_tokens) loaded[i] = load_vec<Loaded>(from + (first + i) * plan.k_row);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) slots[i] = first + i < plan.map.num_tokens ? plan.map.slots[first + i] : -1;

  float most[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const Vec<float, kElements> x = to_floats(loaded[i]);
    most[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kElements; ++e) most[i] = fmaxf(most[i], fabsf(x[e]));  // NaN is not counted
  }
  share_largest(most, plan.lanes_log2);

  const bool leads = (id & ((1u << plan.lanes_log2) - 1)) == 0;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    int64_t page;
    uint32_t offset;
    if (!plan.map.locate(slots[i], page, offset)) continue;
    const float scale = scale_from(most[i], plan.power_of_two);
    char* block = plan.cache + page * plan.block_bytes;
    store_vec(block + int64_t{offset} * plan.values + vector * kElements, Codes::convert(loaded[i], Quotient(scale)));
    if (leads)
      reinterpret_cast<float*>(block + plan.scales_at)[int64_t{offset} * plan.groups + (vector >> plan.lanes_log2)] =
          scale;
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

  float most[1] = {0.0f};
  for (uint32_t e = lane; exists && e < plan.group_size; e += lanes)
    most[0] = fmaxf(most[0], fabsf(to_float(element(e))));
  share_largest(most, plan.lanes_log2);

  int64_t page;
  uint32_t offset;
  if (!exists || !plan.map.locate(plan.map.slots[token], page, offset)) return;
  const float scale = scale_from(most[0], plan.power_of_two);
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
  const int64_t num_slots = args.num_blocks * args.block.block_size, group_lanes = args.group_size / kElements;
  IndexerPlan plan{{args.slots, args.num_tokens, num_slots, Divider(args.block.block_size),
                    num_slots >= int64_t{1} << 31, launch.reporter("indexer_k_quant_and_cache: slot_mapping")},
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
  const bool in_vectors = args.group_size % kElements == 0 && std::has_single_bit(static_cast<uint64_t>(group_lanes)) &&
                          group_lanes <= 32 && args.k_dim == 1 && is_aligned(16, args.k, {args.k_row * kSize}) &&
                          is_aligned(kElements, args.cache, {args.block_bytes});
  if (in_vectors) {
    const int64_t vectors = args.block.values / kElements;
    plan.pieces = Divider(vectors);
    plan.lanes_log2 = static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(group_lanes)));
    const bool few = args.num_tokens * vectors < int64_t{kMostTokens} * kThreads * num_sms(launch.device);
    return dispatch_bool(few, [&]<bool kFew> {
      constexpr int kTokens = kFew ? 1 : kMostTokens;
      for_each_launch(args.num_tokens, vectors, kTokens, [&](int64_t first, uint32_t blocks) {
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
