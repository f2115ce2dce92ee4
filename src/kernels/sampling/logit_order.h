// The total order of logits, as integers: by value, equal ones by index, the lower one first; NaN before everything.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace pykv {

constexpr uint32_t kKeyOfNan = 0xffffffffu;

// Larger floats have larger keys; -0 has that of 0.
PYKV_HOST_DEVICE static inline uint32_t key_of_logit(float x) {
  const uint32_t bits = bits_of(x + 0.0f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return kKeyOfNan;
  return bits ^ ((bits & 0x80000000u) ? 0xffffffffu : 0x80000000u);
}
// The float of a key.  Keys below that of -infinity belong to no float; theirs is NaN.
PYKV_HOST_DEVICE static inline float logit_of_key(uint32_t key) {
  return float_of((key & 0x80000000u) ? key ^ 0x80000000u : ~key);
}

// A logit with its index: larger entries come first.  No real one is 0, as indices are below 2^31.
using Entry = uint64_t;
PYKV_HOST_DEVICE static inline Entry entry_of(uint32_t key, uint32_t index) { return Entry{key} << 32 | ~index; }
PYKV_HOST_DEVICE static inline uint32_t key_of(Entry entry) { return static_cast<uint32_t>(entry >> 32); }
PYKV_HOST_DEVICE static inline uint32_t index_of(Entry entry) { return ~static_cast<uint32_t>(entry); }

}  // namespace pykv
