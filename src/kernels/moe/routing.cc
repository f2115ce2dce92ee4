#include "moe/routing.h"

#include <cinttypes>
#include <cstring>

#include "core/call.h"
#include "core/known_dtypes.h"
#include "pykv/moe.h"

namespace pykv {
namespace {

// The arguments that all of them have.
struct Outputs {
  DLTensor *weights, *ids, *source_rows;
  const char* logits_name;
  const DLTensor *logits, *bias;
  const char* bias_name;
  const DLTensor* is_padding;
};

template <class T>
TokenArray<T> token_array(const Tensor& t) {
  return {static_cast<T*>(t.data()), t.stride(0), t.stride(1)};
}

ExpertBias expert_bias(Call& call, const char* name, const DLTensor* array, int64_t num_experts) {
  if (!array) return {};
  Dim experts{"num_experts", num_experts};
  Tensor bias = call.read(name, array).shape(experts).dtype(kFloats);
  return {bias.data(), bias.stride(0), bias.type()};
}

RoutingArgs routing_args(Call& call, const Outputs& o) {
  Dim tokens{"num_tokens"}, experts{"num_experts"}, top_k{"topk"};
  DLTensor as_known, flags_as_known;
  Tensor logits = call.read(o.logits_name, o.logits).shape(tokens, experts).dtype(kFloats);
  Tensor weights =
      call.write("topk_weights", o.weights).shape(tokens, top_k).dtype({DType::kFloat32}).no_overlap_within();
  Tensor ids = call.write("topk_ids", uint32_as_int32(o.ids, as_known))
                   .shape(tokens, top_k)
                   .dtype({DType::kInt32, DType::kInt64})
                   .no_overlap_within();
  if (experts > kMaxExperts)
    logits.fail(PYKV_VALUE_ERROR, "at most %" PRId64 " experts are supported, got shape %s", kMaxExperts,
                logits.shape_string().c_str());
  if (top_k > experts)
    weights.fail(PYKV_VALUE_ERROR, "must have at most num_experts = %" PRId64 " columns, got shape %s",
                 static_cast<int64_t>(experts), weights.shape_string().c_str());

  RoutingArgs args{};
  args.dtype = logits.type();
  args.ids_are_int64 = ids.type() == DType::kInt64;
  args.logits = token_array<const void>(logits);
  args.weights = token_array<float>(weights);
  args.ids = token_array<void>(ids);
  if (o.source_rows) {
    Tensor rows = call.write("token_expert_indices", o.source_rows)
                      .shape(tokens, top_k)
                      .dtype({DType::kInt32})
                      .no_overlap_within();
    args.source_rows = token_array<int32_t>(rows);
  }
  args.bias = expert_bias(call, o.bias_name, o.bias, experts);
  if (o.is_padding) {
    Tensor flags =
        call.read("is_padding", bool_as_bytes(o.is_padding, flags_as_known)).shape(tokens).dtype({DType::kUInt8});
    args.is_padding = static_cast<const uint8_t*>(flags.data());
    args.is_padding_stride = flags.stride(0);
  }
  args.num_tokens = tokens;
  args.num_experts = static_cast<int32_t>(experts);
  args.top_k = static_cast<int32_t>(top_k);
  args.num_groups = args.kept_groups = 1;
  args.factor = 1.0f;
  return args;
}

void run(Call& call, void* stream, const RoutingArgs& args) {
  if (args.num_tokens != 0 && args.top_k != 0) call.run(stream, args, routing_cpu, PYKV_CUDA(routing_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_topk_softmax(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                              const DLTensor* gating_output, bool renormalize, const DLTensor* e_score_correction_bias,
                              const DLTensor* is_padding, void* stream) {
  return guarded("topk_softmax", [&](Call& call) {
    RoutingArgs args = routing_args(call, {topk_weights, topk_ids, token_expert_indices, "gating_output", gating_output,
                                           e_score_correction_bias, "e_score_correction_bias", is_padding});
    args.scoring = Scoring::kSoftmax;
    args.renormalize = renormalize;
    run(call, stream, args);
  });
}

pykv_status pykv_topk_sigmoid(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                              const DLTensor* gating_output, bool renormalize, const DLTensor* e_score_correction_bias,
                              double routed_scaling_factor, const DLTensor* is_padding, void* stream) {
  return guarded("topk_sigmoid", [&](Call& call) {
    RoutingArgs args = routing_args(call, {topk_weights, topk_ids, token_expert_indices, "gating_output", gating_output,
                                           e_score_correction_bias, "e_score_correction_bias", is_padding});
    args.scoring = Scoring::kSigmoid;
    args.renormalize = renormalize;
    args.factor = number("routed_scaling_factor", routed_scaling_factor);
    run(call, stream, args);
  });
}

pykv_status pykv_topk_softplus_sqrt(DLTensor* topk_weights, DLTensor* topk_ids, DLTensor* token_expert_indices,
                                    const DLTensor* gating_output, bool renormalize, double routed_scaling_factor,
                                    const DLTensor* e_score_correction_bias, const DLTensor* input_ids,
                                    const DLTensor* hash_indices_table, const DLTensor* is_padding,
                                    const DLTensor* bias_vl, int64_t image_sentinel_lo, void* stream) {
  return guarded("topk_softplus_sqrt", [&](Call& call) {
    RoutingArgs args = routing_args(call, {topk_weights, topk_ids, token_expert_indices, "gating_output", gating_output,
                                           e_score_correction_bias, "e_score_correction_bias", is_padding});
    args.scoring = Scoring::kSoftplusSqrt;
    args.renormalize = renormalize;
    args.factor = number("routed_scaling_factor", routed_scaling_factor);
    const char* const by_id = hash_indices_table ? "hash_indices_table" : bias_vl ? "bias_vl" : nullptr;
    if (!input_ids != !by_id)
      fail(PYKV_TYPE_ERROR, "%s: an array is required beside %s, got None",
           input_ids ? "hash_indices_table" : "input_ids", input_ids ? "input_ids" : by_id);
    if (input_ids) {
      Dim tokens{"num_tokens", args.num_tokens};
      args.input_ids = call.read("input_ids", input_ids).shape(tokens).index();
    }
    const ExpertBias image_bias = expert_bias(call, "bias_vl", bias_vl, args.num_experts);
    if (image_sentinel_lo > 0) {
      args.image_bias = image_bias;
      args.first_image_id = image_sentinel_lo;
    }
    if (hash_indices_table) {
      DLTensor as_known;
      Dim vocab{"vocab_size"}, top_k{"topk", args.top_k};
      Tensor table = call.read("hash_indices_table", uint32_as_int32(hash_indices_table, as_known))
                         .shape(vocab, top_k)
                         .dtype({DType::kInt32, DType::kInt64});
      args.table = token_array<const void>(table);
      args.table_is_int64 = table.type() == DType::kInt64;
      args.vocab_size = vocab;
      args.source_rows.data = nullptr;  // as in vLLM
      args.report_input_ids = "topk_softplus_sqrt: input_ids";
      args.report_table = "topk_softplus_sqrt: hash_indices_table";
    }
    run(call, stream, args);
  });
}

pykv_status pykv_grouped_topk(DLTensor* topk_weights, DLTensor* topk_ids, const DLTensor* scores, int64_t n_group,
                              int64_t topk_group, int64_t topk, bool renormalize, double routed_scaling_factor,
                              const DLTensor* bias, int64_t scoring_func, const char* group_score,
                              const DLTensor* is_padding, void* stream) {
  return guarded("grouped_topk", [&](Call& call) {
    RoutingArgs args =
        routing_args(call, {topk_weights, topk_ids, nullptr, "scores", scores, bias, "bias", is_padding});
    const int64_t experts = args.num_experts;
    if (n_group < 1 || n_group > kMaxExpertGroups || experts % n_group != 0)
      fail(PYKV_VALUE_ERROR, "n_group: must be 1 to %" PRId64 " and divide num_experts = %" PRId64 ", got %" PRId64,
           kMaxExpertGroups, experts, n_group);
    if (topk_group < 1 || topk_group > n_group)
      fail(PYKV_VALUE_ERROR, "topk_group: must be 1 to n_group = %" PRId64 ", got %" PRId64, n_group, topk_group);
    if (topk != args.top_k || topk > topk_group * (experts / n_group))
      fail(PYKV_VALUE_ERROR,
           "topk: must equal the columns of topk_weights, %d, and be at most the experts of topk_group groups, %" PRId64
           ", got %" PRId64,
           args.top_k, topk_group * (experts / n_group), topk);
    constexpr Scoring kScorings[] = {Scoring::kNone, Scoring::kSigmoid, Scoring::kSoftmax};
    if (scoring_func < 0 || scoring_func > 2)
      fail(PYKV_VALUE_ERROR, "scoring_func: must be 0 (none), 1 (sigmoid) or 2 (softmax), got %" PRId64, scoring_func);
    required("group_score", group_score);
    args.top2_sum = std::strcmp(group_score, "top2_sum") == 0;
    if (!args.top2_sum && std::strcmp(group_score, "max") != 0)
      fail(PYKV_VALUE_ERROR, "group_score: must be 'top2_sum' or 'max', got '%s'", group_score);
    args.scoring = kScorings[scoring_func];
    args.finite_only = args.scoring != Scoring::kSoftmax;
    args.zero_if_lowest = true;
    args.num_groups = static_cast<int32_t>(n_group);
    args.kept_groups = static_cast<int32_t>(topk_group);
    args.renormalize = renormalize;
    args.factor = number("routed_scaling_factor", routed_scaling_factor);
    args.epsilon = 1e-20f;
    run(call, stream, args);
  });
}
