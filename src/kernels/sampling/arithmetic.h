// Numbers of which both twins have the same bits: built of IEEE operations alone, with each fused multiplication and addition
// spelled out, so that no compiler contracts others; and sums of integers, which have no order.
#pragma once

#include "sampling/logit_order.h"

namespace pykv {

PYKV_HOST_DEVICE static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// ln x within 2e-7, for normal x > 0.
PYKV_HOST_DEVICE static inline float log_of(float x) {
  constexpr uint32_t kRootOfHalf = 0x3f3504f3;
  // x = 2^n m, m from sqrt(1 / 2) to sqrt(2)
  const int32_t n = static_cast<int32_t>(bits_of(x) - kRootOfHalf) >> 23;
  const float m = float_of(bits_of(x) - (static_cast<uint32_t>(n) << 23)), power = static_cast<float>(n);
  // ln m = 2 artanh s, by its series to s^9 / 9; the rest is below 1e-9.
  const float s = (m - 1.0f) / (m + 1.0f), square = s * s;
  float p = fused(square, 0.222222222f, 0.285714286f);
  p = fused(p, square, 0.4f);
  p = fused(p, square, 0.666666667f);
  const float series = fused(p * square, s, s + s);
  return fused(power, 0.693145752f, fused(power, 1.42860677e-6f, series));
}

// Probabilities as integers in units of 2^-40 of the largest one's: those of up to 2^23 tokens have a sum.
using Mass = uint64_t;
constexpr int64_t kMostTokens = 1 << 23;
constexpr int kMassBits = 40;

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits
constexpr uint32_t kBitsOfRound = 0x4b400000;

// 2^(scale * difference), difference <= 0, within 2e-7; 0 below 2^-125.
PYKV_HOST_DEVICE static inline float power_of(float difference, float scale) {
  const bool counts = difference * scale > -125.0f;  // no branch: several run side by side
  if (!counts) difference = 0.0f;
  const float shifted = fused(difference, scale, kRound), n = shifted - kRound;
  const float f = fused(difference, scale, -n);
  // Taylor's series of 2^f, |f| <= 1 / 2, to f^7; the rest is below 6e-9.
  float p = fused(f, 1.52527338e-5f, 1.54035304e-4f);
  p = fused(p, f, 1.33335581e-3f);
  p = fused(p, f, 9.61812911e-3f);
  p = fused(p, f, 5.55041087e-2f);
  p = fused(p, f, 2.40226507e-1f);
  p = fused(p, f, 6.93147181e-1f);
  p = fused(p, f, 1.0f);
  p *= float_of((bits_of(shifted) - kBitsOfRound + 127u) << 23);
  return counts ? p : 0.0f;
}
// How far x lies below the largest.  Infinities have no difference: they count as the largest finite number.
PYKV_HOST_DEVICE static inline float below(float x, float largest) {
  constexpr float kMost = 0x1.fffffep127f;
  return (x < kMost ? x : kMost) - (largest < kMost ? largest : kMost);
}

// The probability of a logit, in units of the largest one's.
PYKV_HOST_DEVICE static inline float share_of_largest(float x, float largest, float scale) {
  return power_of(below(x, largest), scale);
}

// Shares of the largest, 0 to 1, as masses, rounded to a unit.  Each is two integers that lie in the low bits of floats, which is
// faster than conversions are.
struct MassSum {
  uint32_t high = 0, low = 0;  // with kBitsOfRound for each share

  PYKV_HOST_DEVICE void add(float share) {
    constexpr float kHalf = 0x1p20f;
    const float whole = fused(share, kHalf, kRound), rest = fused(share, kHalf, kRound - whole);
    high += bits_of(whole);
    low += bits_of(fused(rest, kHalf, kRound));
  }
  PYKV_HOST_DEVICE void operator+=(const MassSum& other) {
    high += other.high;
    low += other.low;
  }
  PYKV_HOST_DEVICE void operator-=(const MassSum& other) {
    high -= other.high;
    low -= other.low;
  }
  // Of n shares, up to 2048.
  PYKV_HOST_DEVICE Mass of(uint32_t n) const {
    const int32_t rest = static_cast<int32_t>(low - n * kBitsOfRound);  // may be negative
    return (static_cast<Mass>(high - n * kBitsOfRound) << kMassBits / 2) + static_cast<Mass>(int64_t{rest});
  }
};
PYKV_HOST_DEVICE static inline Mass mass_of_share(float share) {
  MassSum sum;
  sum.add(share);
  return sum.of(1);
}
// The mass of a logit: 2^(scale * (x - largest)).
PYKV_HOST_DEVICE static inline Mass mass_of(float x, float largest, float scale) {
  return mass_of_share(share_of_largest(x, largest, scale));
}

// What sums of the first masses must reach to be a share p, 0 < p < 1, of all.
PYKV_HOST_DEVICE static inline Mass share_of(Mass total, float p) {
  const uint64_t parts = static_cast<uint64_t>(p * 4294967296.0f);  // of 2^32
  const uint64_t low = (total & 0xffffffffu) * parts, high = (total >> 32) * parts;
  const Mass share = high + (low >> 32) + ((low & 0xffffffffu) != 0);
  return share > 0 ? share : 1;
}

// The logarithm of min_p > 0: how far below the largest logit others are still kept; at most 0.
PYKV_HOST_DEVICE static inline float log_of_min_p(float min_p) {
  return min_p >= 1.0f ? 0.0f : log_of(min_p < 0x1p-126f ? 0x1p-126f : min_p);
}
// Logits below this one have less than min_p times the largest one's probability.
PYKV_HOST_DEVICE static inline float least_logit(float log_min_p, float temperature, float largest) {
  const float least = fused(log_min_p, temperature, largest);
  return least <= largest ? least : -__builtin_inff();  // NaN: of an infinite temperature, where all have the same
}
// top_p, or 0 for what is less; NaN keeps all.
PYKV_HOST_DEVICE static inline float known_top_p(float top_p) {
  return top_p > 0.0f ? top_p : top_p <= 0.0f ? 0.0f : 1.0f;
}

// ---- random numbers ----

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words for a key and a counter.
struct FourWords {
  uint32_t w[4];
};
template <int kRounds = 10>
PYKV_HOST_DEVICE static inline FourWords philox(FourWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.w[0], b = uint64_t{0xCD9E8D57u} * counter.w[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.w[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.w[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// A word as a number in (0, 1).
PYKV_HOST_DEVICE static inline float uniform_of(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

// An exponentially distributed number, not below uniform_of(word).
PYKV_HOST_DEVICE static inline float exponential_of(uint32_t word) {
  const float u = uniform_of(word), rest = 1.0f - u;
  return rest == 1.0f ? u : -log_of(rest) * (u / (1.0f - rest));  // -ln(1 - u), exact near 0
}

namespace {

// The stream of a request's step: each token has an exponentially distributed number, whatever else is in the batch.  -ln of it is
// of Gumbel's distribution: the token with the largest sum of its logit and that is drawn by softmax.
//
// The least of the numbers of a group of 16 tokens is exponentially distributed with a 16th of the mean; any token of the group has it
// with the same probability, and what the others have beyond it is exponentially distributed as well.  So one number bounds 16
// tokens, and where none of them can win, no more are worked out.
struct TokenNoise {
  static constexpr uint32_t kGroup = 16;

  uint32_t key0, key1, step0, step1;

  PYKV_HOST_DEVICE static TokenNoise of(int64_t seed, int64_t step) {
    const auto low = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x)); };
    const auto high = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); };
    return {low(seed), high(seed), low(step), high(step)};
  }
  // Of tokens kGroup * group and those behind it: the first word is the least number's, the first bits of the second one are the
  // place of the token that has it.
  PYKV_HOST_DEVICE FourWords least_of_group(uint32_t group) const {
    return philox({{group, kCounterOfGroups, step0, step1}}, key0, key1);
  }
  PYKV_HOST_DEVICE static float least_number(uint32_t first_word) {
    return exponential_of(first_word) * (1.0f / kGroup);
  }
  PYKV_HOST_DEVICE float operator()(uint32_t token) const {
    const FourWords least = least_of_group(token / kGroup);
    float number = least_number(least.w[0]);
    if (token % kGroup != place_of_least(least.w[1])) number += exponential_of(own_word(token));
    return -log_of(number);
  }

  static constexpr uint32_t kCounterOfGroups = 2;
  PYKV_HOST_DEVICE static uint32_t place_of_least(uint32_t second_word) { return second_word >> 28; }

 private:
  PYKV_HOST_DEVICE uint32_t own_word(uint32_t token) const {
    const FourWords words = philox({{token / 4, 0, step0, step1}}, key0, key1);
    return token % 4 < 2 ? (token % 4 == 0 ? words.w[0] : words.w[1]) : (token % 4 == 2 ? words.w[2] : words.w[3]);
  }
};

}  // namespace

// What is compared: as an Entry, with the token.  -infinity is never drawn; NaN comes first, and is told from the result.
PYKV_HOST_DEVICE static inline Entry drawn_entry(float logit, float inverse_temperature, float noise, uint32_t token) {
  if (logit == -__builtin_inff()) return 0;
  if (logit != logit) return entry_of(kKeyOfNan, token);
  return entry_of(key_of_logit(fused(logit, inverse_temperature, noise)), token);
}

}  // namespace pykv
