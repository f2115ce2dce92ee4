// What layers of experts check alike, whatever their weights are, and what follows from it.
#pragma once

#include <algorithm>
#include <cinttypes>

#include "activation/named_activation.h"
#include "moe/pair_inputs.h"
#include "moe/sum_rows.h"

namespace pykv {

struct LayerOptions {
  const DLTensor *topk_weights, *topk_ids, *expert_map;  // the last may be null
  ActivationNumbers numbers;
  bool weights_on_input;
  DLTensor* workspace;  // may be null
  void* stream;
};

// What layers of all weights have in common: arguments that are checked, and what follows from them.
struct Layer {
  Call& call;
  const NamedActivation& activation;
  Dim tokens{"num_tokens"}, hidden{"hidden_size"}, experts{"num_experts of w1"}, width{"rows of w1"};
  Tensor from, to;

  Layer(Call& c, DLTensor* out, const DLTensor* x, const char* name)
      : call(c), activation(named_activation(name)), from(call.read("x", x)), to(call.write("out", out)) {
    from.dtype({DType::kFloat16, DType::kBFloat16}).shape(tokens, hidden).contiguous_rows();
    to.like(from).shape(tokens, hidden).contiguous_rows().no_overlap_within();
  }

  // Columns of w2, when those of w1 are known.
  Dim inner() const {
    const bool gated = activation.is_gated();
    if (gated && width % 2 != 0)
      fail(PYKV_VALUE_ERROR, "w1: has two rows for each column of w2, and must have an even number, got %" PRId64,
           static_cast<int64_t>(width));
    return {gated ? "half the rows of w1" : "rows of w1", gated ? width / 2 : width};
  }

  int64_t num_experts(const DLTensor* expert_map) const {
    return expert_map ? Tensor("expert_map", expert_map).numel() : int64_t{experts};
  }

  // Of blocks of one place each.
  SortPairsArgs sort(const LayerOptions& options) const {
    const DLTensor* const expert_map = options.expert_map;
    SortPairsArgs sort =
        pair_args(call, options.topk_ids, expert_map, expert_map ? "elements of expert_map" : "num_experts of w1",
                  num_experts(expert_map), experts, {"fused_moe: topk_ids", "fused_moe: expert_map"});
    if (sort.num_tokens != tokens)
      fail(PYKV_VALUE_ERROR, "topk_ids: dimension 0 must equal num_tokens = %" PRId64 ", got %" PRId64,
           static_cast<int64_t>(tokens), sort.num_tokens);
    const int64_t widest = std::max<int64_t>(width, hidden);
    if (sort.num_pairs != 0 && widest > (int64_t{1} << 60) / sort.num_pairs)
      fail(PYKV_NOT_IMPLEMENTED, "topk_ids: rows of %" PRId64 " elements for each of %" PRId64 " pairs are too many",
           widest, sort.num_pairs);
    sort.capacity = sort.num_pairs;
    sort.sentinel = static_cast<int32_t>(sort.num_pairs);
    sort.dropped_place = -1;
    return sort;
  }

  Tensor weights(const LayerOptions& options, const SortPairsArgs& sort) const {
    Dim pairs_tokens{"num_tokens", sort.num_tokens}, top_k{"topk", sort.top_k};
    return call.read("topk_weights", options.topk_weights).shape(pairs_tokens, top_k).dtype({DType::kFloat32});
  }

  // Of args.sum, and of those of the activation.
  template <class Args>
  void set_rest(Args& args, const Tensor& weights, const LayerOptions& options) const {
    args.activation = &activation;
    args.gated.dtype = args.gated.result_dtype = args.elementwise.dtype = from.type();
    if (activation.is_gated()) activation.set(args.gated, options.numbers);
    if (!options.weights_on_input) {
      args.sum.weights = static_cast<const float*>(weights.data());
      args.sum.weights_token_stride = weights.stride(0);
      args.sum.weights_stride = weights.stride(1);
    }
    args.sum.dtype = to.type();
    args.sum.out = to.data();
    args.sum.out_stride = to.stride(0);
    args.sum.num_tokens = tokens;
    args.sum.top_k = args.sort.top_k;
    args.sum.width = hidden;
  }

  template <class Args>
  void run(Args& args, const LayerOptions& options, std::type_identity_t<Twin<Args>> cpu,
           std::type_identity_t<Twin<Args>> cuda) const {
    if (options.workspace) {
      Tensor t = call.write("workspace", options.workspace).rank(1).dtype({DType::kUInt8}).contiguous();
      if (t.numel() < args.workspace_bytes)
        t.fail(PYKV_VALUE_ERROR, "%" PRId64 " bytes are needed, got %" PRId64, args.workspace_bytes, t.numel());
      args.workspace = t.data();
      if (reinterpret_cast<uintptr_t>(args.workspace) % 16 != 0)
        t.fail(PYKV_VALUE_ERROR, "must be aligned to 16 bytes, got address %p", args.workspace);
    }
    if (tokens != 0 && hidden != 0) call.run(options.stream, args, cpu, cuda);
  }
};

// Weights of 8 bits for activations of 8 bits: their scales, and, which may be null, those of rows of x and of the activation,
// and biases.
struct QuantisedLayer {
  const DLTensor *w1, *w2, *w1_scale, *w2_scale, *a1_scale, *a2_scale, *w1_bias, *w2_bias;
};
void call_quantised_moe(Layer& layer, const LayerOptions& options, const QuantisedLayer& weights);

}  // namespace pykv
