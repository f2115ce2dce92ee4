// Few sequences whose block tables have room for long ones: nobody but the device knows whether clusters suit the call, each of
// which takes a KV head of a sequence and is quick where sequences are much alike or short, or the line, on which all blocks share
// a long one.
#pragma once

#include "attention/plan.h"

namespace pykv::attention {

// By all lanes of a warp, of all warps alike.  length(s): of a sequence.
__device__ bool suits_clusters(const Balance& balance, int num_seqs, auto&& length) {
  int longest = 0, all = 0;
#pragma unroll 1
  for (int s = threadIdx.x % 32; s < num_seqs; s += 32) {
    const int units = (length(s) + Balance::kUnit - 1) / Balance::kUnit;
    longest = max(longest, units);
    all += units;
  }
  longest = __reduce_max_sync(~0u, longest);
  all = __reduce_add_sync(~0u, all);
  return static_cast<float>(longest) <= balance.share * static_cast<float>(all) + balance.slack;
}

}  // namespace pykv::attention
