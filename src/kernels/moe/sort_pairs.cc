#include "moe/sort_pairs.h"

#include <algorithm>
#include <cinttypes>

#include "core/known_dtypes.h"
#include "moe/pair_inputs.h"
#include "pykv/moe.h"

namespace pykv {
namespace {

constexpr int64_t kMost = INT32_MAX;  // places are int32
constexpr int64_t kMostExperts = 65536;

int64_t positive(const char* name, int64_t value) {
  if (value < 1 || value > kMost)
    fail(PYKV_VALUE_ERROR, "%s: must be positive and fit int32, got %" PRId64, name, value);
  return value;
}

// The places that pairs of any ids may take, each bin padded: sorted must have as many, and blocks as many blocks.
void take_block_outputs(SortPairsArgs& args, Tensor& sorted, Tensor& blocks, Tensor& num_padded, int64_t most) {
  if (most > kMost)
    fail(PYKV_NOT_IMPLEMENTED, "block_size: with padding there are up to %" PRId64 " places, more than int32 counts",
         most);
  if (sorted.size(-1) < most)
    sorted.fail(PYKV_VALUE_ERROR, "must have room for %" PRId64 " places, got shape %s", most,
                sorted.shape_string().c_str());
  if (blocks.size(-1) < most / args.block_size)
    blocks.fail(PYKV_VALUE_ERROR, "must have room for %" PRId64 " blocks, got shape %s", most / args.block_size,
                blocks.shape_string().c_str());
  args.sorted = static_cast<int32_t*>(sorted.data());
  args.capacity = sorted.size(-1);
  args.blocks = static_cast<int32_t*>(blocks.data());
  args.num_blocks = blocks.size(-1);
  args.num_padded = static_cast<int32_t*>(num_padded.data());
}

int64_t most_places(const SortPairsArgs& args) {
  return args.num_pairs + std::min(args.num_pairs, args.num_listed) * (args.block_size - 1);
}

void run(Call& call, void* stream, const SortPairsArgs& args) {
  call.run(stream, args, sort_pairs_cpu, PYKV_CUDA(sort_pairs_cuda));
}

}  // namespace

Tensor int32_output(Call& call, const char* name, DLTensor* t) {
  return call.write(name, t).dtype({DType::kInt32}).contiguous();
}

SortPairsArgs pair_args(Call& call, const DLTensor* topk_ids, const DLTensor* expert_map, const char* experts_name,
                        int64_t num_experts, int64_t num_listed, const PairReports& reports) {
  if (num_experts < 1 || num_experts > kMostExperts)
    fail(PYKV_VALUE_ERROR, "%s: must be 1 to %" PRId64 ", got %" PRId64, experts_name, kMostExperts, num_experts);
  Dim tokens{"num_tokens"}, top_k{"topk"}, experts{experts_name, num_experts};
  DLTensor as_known;
  Tensor ids = call.read("topk_ids", uint32_as_int32(topk_ids, as_known))
                   .shape(tokens, top_k)
                   .dtype({DType::kInt32, DType::kInt64});
  if (ids.numel() > kMost)
    ids.fail(PYKV_NOT_IMPLEMENTED, "2^31 pairs and more are not supported, got shape %s", ids.shape_string().c_str());

  SortPairsArgs args{};
  args.ids = {ids.data(), ids.stride(0), ids.stride(1), ids.type() == DType::kInt64};
  args.num_tokens = tokens;
  args.top_k = top_k;
  args.num_pairs = ids.numel();
  args.num_experts = num_experts;
  args.num_bins = args.num_listed = num_listed;
  args.block_size = 1;
  args.report_ids = reports.ids;
  args.report_map = reports.map;
  if (expert_map) {
    args.expert_map = call.read("expert_map", expert_map).shape(experts).index();
  }
  return args;
}

}  // namespace pykv

using namespace pykv;

pykv_status pykv_moe_align_block_size(const DLTensor* topk_ids, int64_t num_experts, int64_t block_size,
                                      DLTensor* sorted_token_ids, DLTensor* experts_ids, DLTensor* num_tokens_post_pad,
                                      const DLTensor* expert_map, DLTensor* scatter_idx, void* stream) {
  return guarded("moe_align_block_size", [&](Call& call) {
    SortPairsArgs args = pair_args(call, topk_ids, expert_map, "num_experts", num_experts, num_experts,
                                   {"moe_align_block_size: topk_ids", "moe_align_block_size: expert_map"});
    args.block_size = positive("block_size", block_size);
    args.sentinel = static_cast<int32_t>(args.num_pairs);
    Dim one{"1", 1};
    Tensor sorted = int32_output(call, "sorted_token_ids", sorted_token_ids).rank(1);
    Tensor blocks = int32_output(call, "experts_ids", experts_ids).rank(1);
    Tensor num_padded = int32_output(call, "num_tokens_post_pad", num_tokens_post_pad).shape(one);
    take_block_outputs(args, sorted, blocks, num_padded, most_places(args));
    if (scatter_idx) {
      Tensor places = int32_output(call, "scatter_idx", scatter_idx);
      if (places.numel() != args.num_pairs)
        places.fail(PYKV_VALUE_ERROR, "must have %" PRId64 " elements, got shape %s", args.num_pairs,
                    places.shape_string().c_str());
      args.places = static_cast<int32_t*>(places.data());
      args.dropped_place = -1;
    }
    run(call, stream, args);
  });
}

pykv_status pykv_batched_moe_align_block_size(int64_t max_tokens_per_batch, int64_t block_size,
                                              const DLTensor* expert_num_tokens, DLTensor* sorted_token_ids,
                                              DLTensor* experts_ids, DLTensor* num_tokens_post_pad, void* stream) {
  return guarded("batched_moe_align_block_size", [&](Call& call) {
    Dim experts{"num_experts"}, one{"1", 1};
    SortPairsArgs args{};
    args.sizes = call.read("expert_num_tokens", expert_num_tokens).shape(experts).index();
    args.rows_of_bin = positive("max_tokens_per_batch", max_tokens_per_batch);
    args.block_size = positive("block_size", block_size);
    args.num_bins = args.num_listed = experts;
    args.report_sizes = "batched_moe_align_block_size: expert_num_tokens";
    Tensor sorted = int32_output(call, "sorted_token_ids", sorted_token_ids).rank(1);
    Tensor blocks = int32_output(call, "experts_ids", experts_ids).rank(1);
    Tensor num_padded = int32_output(call, "num_tokens_post_pad", num_tokens_post_pad).shape(one);
    const int64_t padded = (max_tokens_per_batch + block_size - 1) / block_size * block_size;
    int64_t most;
    if (__builtin_mul_overflow(padded, static_cast<int64_t>(experts), &most)) most = kMost + 1;
    take_block_outputs(args, sorted, blocks, num_padded, most);
    args.sentinel = static_cast<int32_t>(experts * max_tokens_per_batch);
    run(call, stream, args);
  });
}

pykv_status pykv_moe_lora_align_block_size(const DLTensor* topk_ids, const DLTensor* token_lora_mapping,
                                           int64_t num_experts, int64_t block_size, int64_t max_loras,
                                           int64_t max_num_tokens_padded, int64_t max_num_m_blocks,
                                           DLTensor* sorted_token_ids, DLTensor* experts_ids,
                                           DLTensor* num_tokens_post_pad, const DLTensor* adapter_enabled,
                                           const DLTensor* lora_ids, const DLTensor* expert_map, void* stream) {
  return guarded("moe_lora_align_block_size", [&](Call& call) {
    SortPairsArgs args = pair_args(call, topk_ids, expert_map, "num_experts", num_experts, num_experts,
                                   {"moe_lora_align_block_size: topk_ids", "moe_lora_align_block_size: expert_map"});
    args.block_size = positive("block_size", block_size);
    args.sentinel = static_cast<int32_t>(args.num_pairs);
    args.max_adapters = positive("max_loras", max_loras);
    args.report_adapters = "moe_lora_align_block_size: lora_ids";
    Dim tokens{"num_tokens", args.num_tokens}, loras{"max_loras", max_loras}, lists{"number of lists"};
    args.token_adapters = call.read("token_lora_mapping", token_lora_mapping).shape(tokens).index();
    Tensor enabled = call.read("adapter_enabled", adapter_enabled).rank(1);
    if (enabled.size(0) < max_loras)
      enabled.fail(PYKV_VALUE_ERROR, "must have at least max_loras = %" PRId64 " elements, got shape %s", max_loras,
                   enabled.shape_string().c_str());
    args.adapter_enabled = enabled.index();
    args.adapters = call.read("lora_ids", lora_ids).shape(lists).index();
    args.num_lists = lists;
    if (lists > 65535) fail(PYKV_NOT_IMPLEMENTED, "lora_ids: more than 65535 lists are not supported");
    // The outputs are [max_loras, n], or as many elements in one dimension.
    Tensor sorted = int32_output(call, "sorted_token_ids", sorted_token_ids);
    Tensor blocks = int32_output(call, "experts_ids", experts_ids);
    Tensor num_padded = int32_output(call, "num_tokens_post_pad", num_tokens_post_pad).shape(loras);
    const auto rows = [&](Tensor& t, const char* name, int64_t width, int64_t most) {
      if (width < most) fail(PYKV_VALUE_ERROR, "%s: must be at least %" PRId64 ", got %" PRId64, name, most, width);
      int64_t wanted;
      if (__builtin_mul_overflow(width, max_loras, &wanted) || t.numel() != wanted)
        t.fail(PYKV_VALUE_ERROR, "must have max_loras * %s = %" PRId64 " * %" PRId64 " elements, got shape %s", name,
               max_loras, width, t.shape_string().c_str());
      return static_cast<int32_t*>(t.data());
    };
    const int64_t most = most_places(args);
    if (most > kMost) fail(PYKV_NOT_IMPLEMENTED, "block_size: more places than int32 counts are not supported");
    args.sorted = rows(sorted, "max_num_tokens_padded", max_num_tokens_padded, most);
    args.blocks = rows(blocks, "max_num_m_blocks", max_num_m_blocks, most / block_size);
    args.capacity = args.list_stride = max_num_tokens_padded;
    args.num_blocks = args.blocks_stride = max_num_m_blocks;
    args.num_padded = static_cast<int32_t*>(num_padded.data());
    args.num_padded_stride = 1;
    if (lists != 0) run(call, stream, args);
  });
}

pykv_status pykv_get_cutlass_moe_mm_data(const DLTensor* topk_ids, DLTensor* expert_offsets, DLTensor* problem_sizes1,
                                         DLTensor* problem_sizes2, DLTensor* input_permutation,
                                         DLTensor* output_permutation, int64_t num_experts, int64_t n, int64_t k,
                                         DLTensor* blockscale_offsets, bool is_gated, void* stream) {
  return guarded("get_cutlass_moe_mm_data", [&](Call& call) {
    SortPairsArgs args = pair_args(call, topk_ids, nullptr, "num_experts", num_experts, num_experts,
                                   {"get_cutlass_moe_mm_data: topk_ids", nullptr});
    Dim ends{"num_experts + 1", num_experts + 1}, experts{"num_experts", num_experts}, three{"3", 3},
        pairs{"num_tokens * topk", args.num_pairs};
    const auto output = [&](const char* name, DLTensor* t, auto&... dims) {
      return static_cast<int32_t*>(int32_output(call, name, t).shape(dims...).data());
    };
    args.offsets = output("expert_offsets", expert_offsets, ends);
    args.problems1 = output("problem_sizes1", problem_sizes1, experts, three);
    args.problems2 = output("problem_sizes2", problem_sizes2, experts, three);
    args.sorted_tokens = output("input_permutation", input_permutation, pairs);
    args.places = output("output_permutation", output_permutation, pairs);
    if (blockscale_offsets) args.offsets_of_128 = output("blockscale_offsets", blockscale_offsets, ends);
    args.dropped_place = static_cast<int32_t>(args.num_tokens);
    args.inner = positive("n", n);
    args.hidden = positive("k", k);
    args.columns = is_gated ? 2 * n : n;
    args.is_swapped = !blockscale_offsets && args.num_pairs <= 64;
    if (args.columns > kMost || args.num_pairs + 127 * num_experts > kMost)
      fail(PYKV_NOT_IMPLEMENTED, "n: sizes beyond int32 are not supported");
    run(call, stream, args);
  });
}
