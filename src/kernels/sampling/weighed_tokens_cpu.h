// A token of a row, drawn by its weight.
#pragma once

#include <cmath>

#include "sampling/weighed_tokens.h"

namespace pykv::PYKV_ISA {
namespace {

// What wins among tokens that may be drawn; 0: all their weights are 0.  weight(token), may_be_drawn(token).
template <class Weight, class MayBeDrawn>
Entry best_token(const TokenNoise& noise, int vocab_size, Weight weight, MayBeDrawn may_be_drawn) {
  constexpr int kGroup = TokenNoise::kGroup;
  Entry best = 0;
  float reach = __builtin_inff();  // of a weight: what its number must not exceed
  for (int first = 0; first < vocab_size; first += kGroup) {
    float weights[kGroup] = {};
    bool any = false;
    for (int i = 0; i < kGroup && first + i < vocab_size; ++i) {
      weights[i] = weight(first + i);
      any |= weights[i] != 0.0f;
    }
    if (!any) continue;
    const float least = TokenNoise::least_number(noise.least_of_group(static_cast<uint32_t>(first / kGroup)).w[0]);
    for (int i = 0; i < kGroup; ++i) {
      if (weights[i] == 0.0f || least > weights[i] * reach) continue;
      const uint32_t token = static_cast<uint32_t>(first + i);
      const Entry entry = weighed_entry(weights[i], noise(token), token);
      if (entry <= best || !may_be_drawn(first + i)) continue;
      best = entry;
      reach = 1.01f * std::exp(-logit_of_key(key_of(best)));
    }
  }
  return best;
}

}  // namespace
}  // namespace pykv::PYKV_ISA
