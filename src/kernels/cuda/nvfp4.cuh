// nvfp4 (core/nvfp4.h) without the conversion instructions that only later chips have.
//
// e2m1 is uniform in three pieces, with code = 2 y below 2, y + 2 below 4 and y / 2 + 4 from there: the magnitude's code is
// the least of these three lines, each rounded by one fused multiplication and addition to a large number, whose lowest
// bits are then the code.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/nvfp4.h"
#include "cuda/fp8.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// Sixteen elements: code i in bits 4i and following.
struct Nvfp4Codes {
  uint2 codes;
  uint8_t scale;
};

// What the blocks of a head share.
class Nvfp4Quantiser {
 public:
  __device__ explicit Nvfp4Quantiser(float global) : global_(global), six_global_(kNvfp4Largest * global) {}

  // Sixteen neighbours of type T (float, half or bf16), as the words they lie in.
  template <class T>
  __device__ __forceinline__ Nvfp4Codes operator()(const uint32_t (&words)[4 * sizeof(T)]) const {
    constexpr int kWords = 4 * sizeof(T), kElements = kNvfp4Block;
    bool plain;  // no NaN here, and no code can exceed that of 6
    const T most = largest<T>(words, plain);
    Nvfp4Codes result;
    float scale[1] = {to_float(most)};
    const bool zeros = scale[0] == 0.0f;
    six_global_.divide<T>(scale);
    const uint32_t code = __nv_cvt_float_to_fp8(scale[0], __NV_SATFINITE, __NV_E4M3) & 0x7fu;
    const uint32_t magnitude = zeros ? 0u : code;
    result.scale = zeros ? uint8_t{0} : static_cast<uint8_t>(code | (six_global_.sign_bytes() & 0x80u));
    const float r = magnitude == 0 ? 0.0f : __frcp_rn(__fmul_rn(fp8_to_float<KvFormat::kE4M3>(result.scale), global_));
    // A normal scale below the largest was rounded by 1 in 17 at most: |x| r < 6.5.
    plain = plain && magnitude >= 0x08u && magnitude < 0x7eu && r < __uint_as_float(0x7f800000u);

    float y[kElements];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        y[i] = __fmul_rn(fabsf(__uint_as_float(words[i])), r);
      } else {
        const float2 pair = word_to_floats<T>(words[i]);
        y[2 * i] = __fmul_rn(fabsf(pair.x), r);
        y[2 * i + 1] = __fmul_rn(fabsf(pair.y), r);
      }
    }
    if (!plain) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) y[i] = y[i] == y[i] ? fminf(y[i], kNvfp4Largest) : 0.0f;
    }
    uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int i = kElements - 1; i >= 0; --i) packed[i / 8] = packed[i / 8] * 16 + magnitude_bits(y[i]);
    result.codes.x = (packed[0] - kExtra) | sign_bits<T, 0>(words);
    result.codes.y = (packed[1] - kExtra) | sign_bits<T, 1>(words);
    return result;
  }

 private:
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr uint32_t kRoundBits = 0x4b400000u;
  static constexpr uint32_t kExtra = kRoundBits * 0x11111111u;  // what eight codes carry beside themselves

  // The code in the lowest bits of kRoundBits, for 0 <= y < 7.
  static __device__ uint32_t magnitude_bits(float y) {
    // Positive floats are in the order of their bits; from sm_90 on the least of three is one instruction.
    return __vimin3_u32(__float_as_uint(__fmaf_rn(y, 2.0f, kRound)), __float_as_uint(__fadd_rn(y, kRound + 2.0f)),
                        __float_as_uint(__fmaf_rn(y, 0.5f, kRound + 4.0f)));
  }

  // The signs of elements 8 kHalf and following, in bits 3, 7, ...
  template <class T, int kHalf>
  static __device__ uint32_t sign_bits(const uint32_t (&words)[4 * sizeof(T)]) {
    uint32_t even, odd;  // bytes whose highest bit is the sign of an element
    if constexpr (sizeof(T) == 4) {
      const uint32_t* w = words + 8 * kHalf;
      even = __byte_perm(__byte_perm(w[0], w[2], 0x0073), __byte_perm(w[4], w[6], 0x0073), 0x5410);
      odd = __byte_perm(__byte_perm(w[1], w[3], 0x0073), __byte_perm(w[5], w[7], 0x0073), 0x5410);
    } else {
      const uint32_t* w = words + 4 * kHalf;
      even = __byte_perm(__byte_perm(w[0], w[1], 0x0051), __byte_perm(w[2], w[3], 0x0051), 0x5410);
      odd = __byte_perm(__byte_perm(w[0], w[1], 0x0073), __byte_perm(w[2], w[3], 0x0073), 0x5410);
    }
    return (even & 0x80808080u) >> 4 | (odd & 0x80808080u);
  }

  // The largest magnitude; NaN is not counted, but makes `plain` false.
  template <class T>
  static __device__ T largest(const uint32_t (&words)[4 * sizeof(T)], bool& plain) {
    constexpr int kWords = 4 * sizeof(T);
    if constexpr (sizeof(T) == 4) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) most = max(most, words[i] & 0x7fffffffu);
      plain = most <= 0x7f800000u;
      if (plain) return __uint_as_float(most);
      float number = 0.0f;
#pragma unroll
      for (int i = 0; i < kWords; ++i) number = fmaxf(number, fabsf(__uint_as_float(words[i])));
      return number;
    } else {
      using Pair = std::conditional_t<kDTypeOf<T> == DType::kFloat16, half2, __nv_bfloat162>;
      const auto magnitudes = [&](int i) {
        const uint32_t word = words[i] & 0x7fff7fffu;
        return reinterpret_cast<const Pair&>(word);
      };
      Pair most = magnitudes(0);
#pragma unroll
      for (int i = 1; i < kWords; ++i) most = __hmax2_nan(most, magnitudes(i));
      const T all = __hmax_nan(most.x, most.y);
      plain = !__hisnan(all);
      if (plain) return all;
      const T zero = from_float<T>(0.0f);
      Pair numbers = {zero, zero};
#pragma unroll
      for (int i = 0; i < kWords; ++i) numbers = __hmax2(numbers, magnitudes(i));
      return __hmax(numbers.x, numbers.y);
    }
  }

  float global_;
  Quotient six_global_;
};

// Eight codes as halves, two neighbours a word.  Of these halves only the higher byte is not 0: it is looked up among eight.
__device__ __forceinline__ void e2m1x8_to_halves(uint32_t codes, uint32_t (&halves)[4]) {
  const uint32_t magnitudes = codes & 0x77777777u, evens = codes << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bytes = __byte_perm(0x3e3c3800u, 0x46444240u, magnitudes >> (16 * i));  // 0 0.5 1 1.5, 2 3 4 6
    const uint32_t signs = __byte_perm(evens, codes, i == 0 ? 0x5140 : 0x7362);            // bit 7 of each byte
    const uint32_t high = bytes | (signs & 0x80808080u);
    halves[2 * i] = __byte_perm(high, 0, 0x1404);
    halves[2 * i + 1] = __byte_perm(high, 0, 0x3424);
  }
}

// Eight codes times the scale of their block: exact.
__device__ __forceinline__ void nvfp4x8_to_half2x4(uint32_t codes, uint8_t scale, half2 (&values)[4]) {
  const half2 scales = fp8x2_to_half2<KvFormat::kE4M3>(static_cast<uint16_t>(scale * 0x0101u));
  uint32_t halves[4];
  e2m1x8_to_halves(codes, halves);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __hmul2(reinterpret_cast<const half2&>(halves[i]), scales);
}

}  // namespace pykv
