// Numbers by which tokens of a draft are accepted, and tokens are drawn by their weight.
#pragma once

#include "sampling/arithmetic.h"

namespace pykv {
namespace {

// What a token at position i of a draft is accepted by: uniform in (0, 1).
PYKV_HOST_DEVICE static inline float acceptance_number(const TokenNoise& noise, int i) {
  const FourWords counter{{static_cast<uint32_t>(i), 1, noise.step0, noise.step1}};
  return uniform_of(philox(counter, noise.key0, noise.key1).w[0]);
}

// What is drawn at position i has the noise of step + i.
PYKV_HOST_DEVICE static inline TokenNoise noise_at(int64_t seed, int64_t step, int i) {
  return TokenNoise::of(seed, static_cast<int64_t>(static_cast<uint64_t>(step) + static_cast<uint64_t>(i)));
}

// The token with the largest of these is drawn by its weight.
PYKV_HOST_DEVICE static inline Entry weighed_entry(float weight, float noise, uint32_t token) {
  if (!(weight < __builtin_inff())) return entry_of(kKeyOfNan, token);
  if (weight < 0x1p-126f) return 0;
  return entry_of(key_of_logit(log_of(weight) + noise), token);
}

}  // namespace
}  // namespace pykv
