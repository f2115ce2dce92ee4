// Which experts a token goes to: the idea behind topk_softmax, topk_sigmoid, topk_softplus_sqrt and grouped_topk.
//
//   s    = score(logit), fp32; one that is not finite counts as 0
//   key  = s + bias; NaN counts as -inf
//   ids  = the top_k experts with the largest keys, of the groups that are kept; of equal keys the lower id
//   w    = s of these, divided by their sum if renormalized, times factor
//
// With hash routing the ids come from a table instead, but for tokens of images, which have a bias of their own.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

enum class Scoring : uint8_t { kNone, kSigmoid, kSoftmax, kSoftplusSqrt };

inline constexpr int64_t kMaxExperts = 1024, kMaxExpertGroups = 32, kImageIds = 5;

// Element (token, i) lies at data + token * token_stride + i * stride (elements).
template <class T>
struct TokenArray {
  T* data;
  int64_t token_stride, stride;

  PYKV_HOST_DEVICE int64_t at(int64_t token, int64_t i) const { return token * token_stride + i * stride; }
};

// A number for each expert.
struct ExpertBias {
  const void* data;  // null: none
  int64_t stride;    // elements
  DType dtype;
};

struct RoutingArgs {
  Scoring scoring;
  DType dtype;
  bool ids_are_int64, table_is_int64, renormalize;
  bool finite_only;     // an expert whose logit is not finite gets the key -inf
  bool zero_if_lowest;  // an expert that was chosen with the key -inf gets the weight 0
  bool top2_sum;        // a group's score: the sum of its two largest keys, else the largest

  TokenArray<const void> logits;
  ExpertBias bias;

  TokenArray<float> weights;
  TokenArray<void> ids;
  TokenArray<int32_t> source_rows;  // data null: not wanted
  const uint8_t* is_padding;        // null: no token is
  int64_t is_padding_stride;

  Index input_ids;  // data null: none
  // hash routing: table[input_ids[t]] is the row of ids of token t
  TokenArray<const void> table;  // data null: none
  int64_t vocab_size;
  const char *report_input_ids, *report_table;
  // Tokens of images: what these have instead of `bias` and the table.
  ExpertBias image_bias;
  int64_t first_image_id;  // and the next kImageIds - 1

  int64_t num_tokens;
  int32_t num_experts, top_k;
  int32_t num_groups, kept_groups;  // of neighbouring experts; 1, 1 without groups
  float factor;
  float epsilon;  // added to the sum

  PYKV_HOST_DEVICE __attribute__((always_inline)) bool is_of_image(int64_t token) const {
    if (!image_bias.data) return false;
    const int64_t id = input_ids[token];
    return id >= first_image_id && id - first_image_id < kImageIds;
  }
};

PYKV_CPU_TWIN(routing_cpu, RoutingArgs)
void routing_cuda(const RoutingArgs& args, const Launch& launch);

}  // namespace pykv
