// A token of a row, drawn by its weight by the blocks that share the row.  Noise is worked out only for tokens that may win
// (row_sampler.cuh).
#pragma once

#include "cuda/approximate.cuh"
#include "sampling/row_passes.cuh"
#include "sampling/weighed_tokens.h"

namespace pykv {

// What wins among tokens that may be drawn; 0: all their weights are 0.  weight(token), may_be_drawn(token).
template <class Weight, class MayBeDrawn>
__device__ Entry best_token(const TokenNoise& noise, RowTeam& team, int vocab_size, Weight weight,
                            MayBeDrawn may_be_drawn) {
  Entry best = 0;
  float reach = INFINITY;  // of a weight: what its random number must not exceed
  const int groups = (vocab_size + 3) / 4;
  for (int first = team.rank() * kSelectThreads; first < groups; first += team.blocks() * kSelectThreads) {
    const int group = first + static_cast<int>(threadIdx.x);
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 4 * group + i;
      weights[i] = group < groups && token < vocab_size ? weight(token) : 0.0f;
    }
    const uint32_t word = noise.least_of_group(static_cast<uint32_t>(group) * 4 / TokenNoise::kGroup).w[0];
    const Entry last = best;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // It wins if its number is below weight * reach, and so only if a 16th of u is.  NaN passes.
      const float least = (__uint_as_float(word >> 9 | 0x3f800000u) - 1.0f) * (1.0f / TokenNoise::kGroup);
      if (least > weights[i] * reach || weights[i] == 0.0f) continue;
      const uint32_t token = static_cast<uint32_t>(4 * group + i);
      const Entry entry = weighed_entry(weights[i], noise(token), token);
      if (entry > best && may_be_drawn(4 * group + i)) best = entry;
    }
    if (__any_sync(0xffffffffu, best != last)) {
      const float score = logit_of_key(__reduce_max_sync(0xffffffffu, key_of(best)));
      reach = score < INFINITY ? power_of_2(-1.44269504f * score) * 1.01f : 0.0f;
    }
  }
  return team.reduce(best, Larger());
}

}  // namespace pykv
