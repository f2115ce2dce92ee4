#include "moe/sum_rows.h"

#include <cinttypes>

#include "core/known_dtypes.h"
#include "moe/pair_inputs.h"
#include "pykv/moe.h"

namespace pykv {
namespace {

void run(Call& call, void* stream, const SumRowsArgs& args) {
  if (args.num_tokens != 0 && args.width != 0) call.run(stream, args, sum_rows_cpu, PYKV_CUDA(sum_rows_cuda));
}

// Of [num_tokens, top_k], or of [num_tokens * top_k].
PairIds pair_ids(const Tensor& t, int64_t top_k) {
  return {t.data(), t.ndim() == 1 ? top_k * t.stride(0) : t.stride(0), t.stride(-1), t.type() == DType::kInt64};
}

void take_out(SumRowsArgs& args, const Tensor& out) {
  args.dtype = out.type();
  args.out = out.data();
  args.out_stride = out.stride(0);
  args.num_tokens = out.size(0);
  args.width = out.size(1);
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_moe_sum(const DLTensor* input, DLTensor* output, const DLTensor* topk_ids, const DLTensor* expert_map,
                         void* stream) {
  return guarded("moe_sum", [&](Call& call) {
    Dim tokens{"num_tokens"}, top_k{"topk"}, width{"hidden_size"}, experts{"num_experts"};
    Tensor rows = call.read("input", input).shape(tokens, top_k, width).dtype(kFloats).contiguous_rows();
    Tensor out = call.write("output", output).shape(tokens, width).like(rows).contiguous_rows().no_overlap_within();
    SumRowsArgs args{};
    take_out(args, out);
    args.rows = rows.data();
    args.token_stride = rows.stride(0);
    args.row_stride = rows.stride(1);
    args.top_k = top_k;
    if (topk_ids) {
      DLTensor as_known;
      args.ids = pair_ids(call.read("topk_ids", uint32_as_int32(topk_ids, as_known))
                              .shape(tokens, top_k)
                              .dtype({DType::kInt32, DType::kInt64}),
                          top_k);
    }
    if (expert_map) {
      if (!topk_ids) fail(PYKV_TYPE_ERROR, "topk_ids: an array is required beside expert_map, got None");
      args.expert_map = call.read("expert_map", expert_map).shape(experts).index();
      args.num_experts = experts;
    }
    args.report_ids = "moe_sum: topk_ids";
    run(call, stream, args);
  });
}

pykv_status pykv_moe_unpermute(const DLTensor* permuted_hidden_states, const DLTensor* topk_weights,
                               const DLTensor* inv_permuted_idx, const DLTensor* expert_first_token_offset,
                               int64_t topk, DLTensor* hidden_states, void* stream) {
  return guarded("moe_unpermute", [&](Call& call) {
    Dim num_rows{"permuted rows"}, tokens{"num_tokens"}, columns{"topk"}, width{"hidden_size"};
    Tensor rows = call.read("permuted_hidden_states", permuted_hidden_states)
                      .shape(num_rows, width)
                      .dtype(kFloats)
                      .contiguous_rows();
    Tensor weights = call.read("topk_weights", topk_weights).shape(tokens, columns).dtype({DType::kFloat32});
    Tensor places =
        call.read("inv_permuted_idx", inv_permuted_idx).rank_between(1, 2).dtype({DType::kInt32, DType::kInt64});
    Dim pairs{"num_tokens * topk", tokens * columns};
    places.ndim() == 1 ? places.shape(pairs) : places.shape(tokens, columns);
    Tensor out = call.write("hidden_states", hidden_states)
                     .shape(tokens, width)
                     .like(rows)
                     .contiguous_rows()
                     .no_overlap_within();
    if (topk != columns)
      fail(PYKV_VALUE_ERROR, "topk: must equal the columns of topk_weights, %" PRId64 ", got %" PRId64,
           static_cast<int64_t>(columns), topk);
    SumRowsArgs args{};
    take_out(args, out);
    args.rows = rows.data();
    args.row_stride = rows.stride(0);
    args.top_k = topk;
    args.weights = static_cast<const float*>(weights.data());
    args.weights_token_stride = weights.stride(0);
    args.weights_stride = weights.stride(1);
    args.places = pair_ids(places, topk);
    args.num_rows = num_rows;
    if (expert_first_token_offset) {
      Tensor offsets = call.read("expert_first_token_offset", expert_first_token_offset)
                           .rank(1)
                           .dtype({DType::kInt64, DType::kInt32});
      if (offsets.size(0) < 1)
        offsets.fail(PYKV_VALUE_ERROR, "must have at least 1 element, got shape %s", offsets.shape_string().c_str());
      const int64_t last = (offsets.size(0) - 1) * offsets.stride(0);
      const bool is_wide = offsets.type() == DType::kInt64;
      args.num_valid = {static_cast<char*>(offsets.data()) + last * (is_wide ? 8 : 4), 0, 0, is_wide};
    }
    args.report_places = "moe_unpermute: inv_permuted_idx";
    run(call, stream, args);
  });
}
