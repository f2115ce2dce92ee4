// Two vectors of floats rounded at once, to 32 numbers of 16 bits: half the instructions of one after the other.
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {
namespace {

#if defined(__AVX512BW__)
// To nearest even.  Of bf16: NaN must have zeros in its lower half, as those have that come of infinities or of numbers of 16 bits.
template <class T>
__m512i rounded_pair(Floats a, Floats b) {
  if constexpr (std::is_same_v<T, bf16>) {
    const auto rounded = [](Floats v) {
      const Words bits = __builtin_bit_cast(Words, v);
      return __builtin_bit_cast(__m512i, bits + (bits >> 16 & 1u) + 0x7fffu);
    };
    alignas(64) static constexpr uint16_t kHigh[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(rounded(a), load_raw<__m512i>(kHigh), rounded(b));
  } else {
    const auto rounded = [](Floats v) {
      return _mm512_maskz_broadcast_i64x4(
          0xff, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    };
    return _mm512_mask_blend_epi64(0xf0, rounded(a), rounded(b));
  }
}
#endif

template <class T>
void store_pair(T* to, Floats a, Floats b) {
#if defined(__AVX512BW__)
  if constexpr (std::is_same_v<T, bf16>) {
    _mm512_storeu_si512(to, rounded_pair<T>(a, b));
    return;
  }
#endif
  store(to, a);
  store(to + kWidth, b);
}

}  // namespace
}  // namespace pykv::PYKV_ISA
