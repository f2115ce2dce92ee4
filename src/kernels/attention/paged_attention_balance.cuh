// Few sequences whose block tables have room for long ones: nobody but the device knows whether clusters suit the call, each of
// which takes a KV head of a sequence and is quick where sequences are much alike or short, or the line, on which all blocks share
// a long one.
#pragma once

#include <cstdint>

namespace pykv::attention {

// What a kernel is launched for: any lengths; or, where another is launched for the same call, those that suit clusters, or those
// that do not.
enum class Lengths : uint8_t { kAny, kForClusters, kForLine };

// Clusters take the call if its longest sequence has at most `share` of all tokens, and `slack` more.
struct Balance {
  static constexpr int kUnit = 128;  // tokens
  float share, slack;                // of a unit

  // Of clusters of so many blocks, if `grid` blocks run at once.  pace: how much quicker a block is alone than if all are busy.
  // tokens: that a block takes in the time by which the line begins and ends later.
  static Balance of(int kv_heads, float blocks, int grid, float pace, int tokens) {
    return {blocks * pace * static_cast<float>(kv_heads) / static_cast<float>(grid),
            blocks * static_cast<float>(tokens) / kUnit};
  }

  // By all lanes of a warp, of all warps alike.  length(s): of a sequence.
  __device__ bool suits_clusters(int num_seqs, auto&& length) const {
    int longest = 0, all = 0;
#pragma unroll 1
    for (int s = threadIdx.x % 32; s < num_seqs; s += 32) {
      const int units = (length(s) + kUnit - 1) / kUnit;
      longest = max(longest, units);
      all += units;
    }
    longest = __reduce_max_sync(~0u, longest);
    all = __reduce_add_sync(~0u, all);
    return static_cast<float>(longest) <= share * static_cast<float>(all) + slack;
  }
};

}  // namespace pykv::attention
