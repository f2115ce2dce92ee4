// A token of a row, drawn by its weight.
#pragma once

#include "sampling/weighed_tokens.h"

namespace pykv::PYKV_ISA {
namespace {

// What wins among tokens that may be drawn; 0: all their weights are 0.  weight(token), may_be_drawn(token).
template <class Weight, class MayBeDrawn>
Entry best_token(const TokenNoise& noise, int vocab_size, Weight weight, MayBeDrawn may_be_drawn) {
  Entry best = 0;
  for (int first = 0; first < vocab_size; first += 4) {
    float weights[4] = {};
    bool any = false;
    for (int i = 0; i < 4 && first + i < vocab_size; ++i) {
      weights[i] = weight(first + i);
      any |= weights[i] != 0.0f;
    }
    if (!any) continue;
    const FourWords words = noise.group(static_cast<uint32_t>(first) / 4);
    for (int i = 0; i < 4; ++i) {
      const Entry entry = weighed_entry(weights[i], words.w[i], static_cast<uint32_t>(first + i));
      if (entry > best && may_be_drawn(first + i)) best = entry;
    }
  }
  return best;
}

}  // namespace
}  // namespace pykv::PYKV_ISA
