// The random words of a row's groups of tokens.
#pragma once

#include "sampling/sample.h"

namespace pykv {

// TokenNoise::least_of_group(), with what the first two rounds of Philox have in common for all groups of a row.
struct NoiseRounds {
  uint32_t key0, key1;  // of the third round
  uint32_t c, d, e, f;

  NoiseRounds() = default;
  __device__ explicit NoiseRounds(const TokenNoise& noise) {
    const uint64_t b = uint64_t{0xCD9E8D57u} * noise.step0;
    const uint64_t a =
        uint64_t{0xD2511F53u} * (static_cast<uint32_t>(b >> 32) ^ TokenNoise::kCounterOfGroups ^ noise.key0);
    c = noise.step1 ^ noise.key1;
    d = static_cast<uint32_t>(b) ^ (noise.key0 + 0x9E3779B9u);
    e = static_cast<uint32_t>(a >> 32) ^ (noise.key1 + 0xBB67AE85u);
    f = static_cast<uint32_t>(a);
    key0 = noise.key0 + 2 * 0x9E3779B9u;
    key1 = noise.key1 + 2 * 0xBB67AE85u;
  }
  __device__ FourWords least_of_group(uint32_t group) const {
    const uint64_t a = uint64_t{0xD2511F53u} * group;
    const uint64_t b = uint64_t{0xCD9E8D57u} * (static_cast<uint32_t>(a >> 32) ^ c);
    return philox<8>({{static_cast<uint32_t>(b >> 32) ^ d, static_cast<uint32_t>(b), static_cast<uint32_t>(a) ^ e, f}},
                     key0, key1);
  }
};

}  // namespace pykv
