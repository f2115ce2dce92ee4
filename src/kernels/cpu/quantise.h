// One-byte results of quantising ops: the nearest code to a number, ties to even, the last one where it is too large.
//
// Unlike in a KV cache (cpu/float16.h), NaN becomes the largest number (E4M3) or 0 (int8).
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

inline void store_quantised(e4m3* to, Floats v, int64_t count) { store(to, min(v, splat(448.0f)), count); }

inline void store_quantised(int8_t* to, Floats v, int64_t count) {
  const Floats within = max(min(v == v ? v : Floats{}, splat(127.0f)), splat(-128.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
  const Bytes codes = narrow_to_bytes(__builtin_bit_cast(Words, within + 12582912.0f));
  int8_t all[kWidth];
  __builtin_memcpy(count >= kWidth ? to : all, &codes, sizeof codes);
  for (int64_t i = 0; count < kWidth && i < count; ++i) to[i] = all[i];
}

}  // namespace pykv::PYKV_ISA
