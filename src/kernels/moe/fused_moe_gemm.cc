#include <algorithm>
#include <cinttypes>

#include "moe/expert_product.h"
#include "moe/pair_inputs.h"
#include "pykv/moe.h"

using namespace pykv;

pykv_status pykv_fused_moe_gemm(DLTensor* out, const DLTensor* x, const DLTensor* w, const DLTensor* topk_weights,
                                const DLTensor* sorted_token_ids, const DLTensor* experts_ids,
                                const DLTensor* num_tokens_post_pad, int64_t top_k, int64_t block_size,
                                const DLTensor* bias, const char* format, void* stream) {
  return guarded("fused_moe_gemm", [&](Call& call) {
    if (top_k < 1 || top_k > INT32_MAX) fail(PYKV_VALUE_ERROR, "top_k: must be positive, got %" PRId64, top_k);
    if (block_size < 8 || block_size % 8 != 0 || block_size > INT32_MAX)
      fail(PYKV_VALUE_ERROR, "block_size: must be a multiple of 8, got %" PRId64, block_size);
    Dim tokens{"rows of x"}, k{"columns of x"}, n{"columns of out"}, experts{"num_experts"}, one{"1", 1};
    const Tensor from = call.read("x", x).dtype({DType::kFloat16, DType::kBFloat16}).shape(tokens, k).contiguous_rows();
    if (tokens > INT32_MAX / top_k)
      from.fail(PYKV_NOT_IMPLEMENTED, "2^31 pairs and more are not supported, got shape %s",
                from.shape_string().c_str());
    Dim pairs{"rows of x times top_k", tokens * top_k};
    const Tensor to = call.write("out", out).like(from).shape(pairs, n).contiguous_rows().no_overlap_within();
    ExpertProduct product = product_args(call, from, {"w", "format", "bias", w, format, bias}, experts, n, k);
    const auto int32s = [&](const char* name, const DLTensor* t) {
      return call.read(name, t).rank(1).dtype({DType::kInt32}).contiguous();
    };
    const Tensor sorted = int32s("sorted_token_ids", sorted_token_ids), blocks = int32s("experts_ids", experts_ids);
    TileMap tiles{};
    tiles.rows = static_cast<const int32_t*>(sorted.data());
    tiles.weights = static_cast<const int32_t*>(blocks.data());
    tiles.taken = static_cast<const int32_t*>(int32s("num_tokens_post_pad", num_tokens_post_pad).shape(one).data());
    tiles.num_blocks = std::min(sorted.size(0) / block_size, blocks.size(0));
    tiles.block_size = block_size;
    tiles.top_k = top_k;
    if (topk_weights) {
      const Tensor weights =
          call.read("topk_weights", topk_weights).dtype({DType::kFloat32}).rank_between(1, 2).contiguous();
      if (weights.numel() != pairs)
        weights.fail(PYKV_VALUE_ERROR, "must have %" PRId64 " elements, got shape %s", static_cast<int64_t>(pairs),
                     weights.shape_string().c_str());
      tiles.factors = static_cast<const float*>(weights.data());
      tiles.factors_token_stride = top_k;
      tiles.factors_stride = 1;
    }
    product.set_rows(tiles, pairs, from.data(), from.stride(0), to.data(), to.stride(0));
    if (tiles.num_blocks != 0 && pairs != 0 && experts != 0)
      call.run(stream, product, expert_product_cpu, PYKV_CUDA(expert_product_cuda));
  });
}
