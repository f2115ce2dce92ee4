// What operations on pairs of tokens and experts check alike.
#pragma once

#include "core/call.h"
#include "moe/sort_pairs.h"

namespace pykv {

// What ids out of range are called: "op: argument", string literals.
struct PairReports {
  const char *ids, *map;
};

// Pairs of topk_ids [num_tokens, topk], to be sorted into num_listed bins: their experts, or what expert_map (may be null)
// makes of them.  All outputs are left out.  experts_name: what the operation calls num_experts.
SortPairsArgs pair_args(Call& call, const DLTensor* topk_ids, const DLTensor* expert_map, const char* experts_name,
                        int64_t num_experts, int64_t num_listed, const PairReports& reports);

// An int32 array that is written whole, contiguous.
Tensor int32_output(Call& call, const char* name, DLTensor* t);

}  // namespace pykv
