// packed_gemm of many tokens on Hopper.
#pragma once

#include "gemm/packed_gemm.h"

namespace pykv {

// Whether it was launched: not for maps, for few tokens, for an epilogue, for weights whose sums of groups are scaled, or where columns, x
// or out do not come in whole copies.
// segments: of the columns, whose sums are added in order.
bool packed_gemm_many_sm90(const PackedGemmArgs& args, int segments, const Launch& launch);

// Rows of out in groups that lie one behind another, each with a weight of its own: args.weight, and those at multiples of
// args.map.weight_stride and bias_stride behind it.
struct TokenGroups {
  int64_t count = 0;
  const int32_t* begins = nullptr;  // [count + 1]
  bool activates = false;           // out is silu_and_mul of the product, with half as many columns
};

// Whether it was launched.  asks: launches nothing, only says whether it would.
bool packed_gemm_of_groups_sm90(const PackedGemmArgs& args, const TokenGroups& groups, int segments, bool asks,
                                const Launch& launch);

}  // namespace pykv
