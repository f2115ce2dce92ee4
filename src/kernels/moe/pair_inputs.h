// What operations on pairs of tokens and experts check alike.
#pragma once

#include "core/call.h"
#include "moe/sort_pairs.h"

namespace pykv {

// Pairs of topk_ids [num_tokens, topk], sorted into num_listed bins; experts as ids, or by expert_map (may be null).  All
// outputs are left out.  `op` is the literal "op: " part of what is reported.
struct PairReports {
  const char *ids, *map;
};
SortPairsArgs pair_args(Call& call, const DLTensor* topk_ids, const DLTensor* expert_map, int64_t num_experts,
                        int64_t num_listed, const PairReports& reports);

// An int32 array that is written whole, contiguous.
Tensor int32_output(Call& call, const char* name, DLTensor* t);

}  // namespace pykv
