// Blocks of sixteen to nvfp4 (core/nvfp4.h) without the conversion instructions that only later chips have.
//
// A block is eight instructions an element, and what is odd is kept out of its way: nearly all blocks are plain.
#pragma once

#include <cstdint>

#include "core/nvfp4.h"
#include "cuda/e2m1.cuh"
#include "cuda/nvfp4.cuh"
#include "cuda/pairs.cuh"
#include "cuda/quotient.cuh"

namespace pykv {

// What the blocks of a head share.
class Nvfp4Quantiser {
 public:
  Nvfp4Quantiser() = default;  // by nothing yet
  __device__ explicit Nvfp4Quantiser(float global, bool four_over_six)
      : global_(global),
        six_global_(kNvfp4Largest * global),
        four_over_six_(four_over_six),
        plain_(global > 0.0f && six_global_.is_plain() && !four_over_six) {}

  // The scale of a block and what its elements are multiplied by.
  struct BlockScale {
    float reciprocal;
    uint32_t code;
  };

  // Whether a block is like nearly all: without NaN, its scale neither 0 nor subnormal nor the largest.  Only then has
  // `block` a meaning.  Sixteen neighbours of type T (float, half or bf16), as the words they lie in.
  template <class T>
  __device__ __forceinline__ bool find_scale(const uint32_t (&words)[4 * sizeof(T)], BlockScale& block) const {
    float scale[1] = {largest_or_nan<T>(words)};
    six_global_.template divide<T>(scale);
    block.code = __nv_cvt_float_to_fp8(scale[0], __NV_SATFINITE, __NV_E4M3);
    // Far from 0 and infinity, so that this is 1 / x to nearest.
    const float x = __fmul_rn(fp8_to_float<KvFormat::kE4M3>(static_cast<uint8_t>(block.code)), global_);
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    block.reciprocal = fmaf(r, fmaf(-x, r, 1.0f), r);
    return plain_ && block.code - 0x08u < 0x7eu - 0x08u;
  }

  // The codes of such a block: its scale was rounded by 1 in 17 at most, so that none can exceed that of 6.
  template <class T>
  __device__ __forceinline__ uint2 plain_codes(const uint32_t (&words)[4 * sizeof(T)], const BlockScale& block) const {
    float y[kNvfp4Block];
    e2m1_multiply<T>(words, block.reciprocal, y);
    return e2m1_codes<T>(words, y);
  }

  // Any block.
  template <class T>
  __device__ __forceinline__ Nvfp4Codes operator()(const uint32_t (&words)[4 * sizeof(T)]) const {
    const float largest = largest_number<T>(words);
    const Nvfp4Codes six = codes_by<T>(words, largest, six_global_, 0);
    if (!four_over_six_) return six;
    const Nvfp4Codes four = codes_by<T>(words, largest, Quotient(kNvfp4Second * global_), 0);
    return error<T>(words, four) < error<T>(words, six) ? four : six;
  }

  // Any block, also of zeros; the code of its scale at least that.
  template <class T>
  __device__ __forceinline__ Nvfp4Codes with_scale_of_at_least(const uint32_t (&words)[4 * sizeof(T)],
                                                               uint32_t least) const {
    return codes_by<T>(words, largest_number<T>(words), six_global_, least);
  }

 private:
  // By the scale for which the largest magnitude is a code: 6 or 4, through which and through the global scale it is divided.
  template <class T>
  __device__ __forceinline__ Nvfp4Codes codes_by(const uint32_t (&words)[4 * sizeof(T)], float largest,
                                                 const Quotient& unit, uint32_t least) const {
    float scale[1] = {largest};
    const bool zeros = largest == 0.0f && least == 0;
    unit.divide<T>(scale);
    const uint32_t code = max(__nv_cvt_float_to_fp8(scale[0], __NV_SATFINITE, __NV_E4M3) & 0x7fu, least);
    Nvfp4Codes result;
    result.scale = zeros ? uint8_t{0} : static_cast<uint8_t>(code | (six_global_.sign_bytes() & 0x80u));
    const float r =
        zeros || code == 0 ? 0.0f : __frcp_rn(__fmul_rn(fp8_to_float<KvFormat::kE4M3>(result.scale), global_));
    float y[kNvfp4Block];
    e2m1_multiply<T>(words, r, y);
#pragma unroll
    for (float& x : y) x = x == x ? fminf(x, kNvfp4Largest) : 0.0f;
    result.codes = e2m1_codes<T>(words, y);
    return result;
  }

  // The sum of the squares of what a block is wrong by.
  template <class T>
  __device__ __forceinline__ float error(const uint32_t (&words)[4 * sizeof(T)], const Nvfp4Codes& block) const {
    float sum = 0.0f;
    const auto add = [&](float x, float value) {
      const float d = __fsub_rn(x, __fmul_rn(value, global_));
      sum = __fadd_rn(sum, __fmul_rn(d, d));
    };
#pragma unroll
    for (int half_block = 0; half_block < 2; ++half_block) {
      half2 values[4];
      nvfp4x8_to_half2x4(half_block ? block.codes.y : block.codes.x, block.scale, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(values[i]);
        if constexpr (sizeof(T) == 4) {
          add(__uint_as_float(words[half_block * 8 + 2 * i]), pair.x);
          add(__uint_as_float(words[half_block * 8 + 2 * i + 1]), pair.y);
        } else {
          const float2 x = word_to_floats<T>(words[half_block * 4 + i]);
          add(x.x, pair.x);
          add(x.y, pair.y);
        }
      }
    }
    return sum;
  }

  // The largest magnitude; NaN if one is.
  template <class T>
  static __device__ float largest_or_nan(const uint32_t (&words)[4 * sizeof(T)]) {
    constexpr int kWords = 4 * sizeof(T);
    if constexpr (sizeof(T) == 4) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) most = max(most, words[i] & 0x7fffffffu);
      return __uint_as_float(most);
    } else {
      uint32_t most = words[0];
#pragma unroll
      for (int i = 1; i < kWords; ++i) most = larger_magnitudes_or_nan<T>(most, words[i]);
      const Pair<T> pair = as_pair<T>(most & 0x7fff7fffu);
      return to_float(__hmax_nan(pair.x, pair.y));
    }
  }

  // The same among what is not NaN.
  template <class T>
  static __device__ float largest_number(const uint32_t (&words)[4 * sizeof(T)]) {
    float most = 0.0f;
#pragma unroll
    for (const uint32_t word : words) {
      if constexpr (sizeof(T) == 4) {
        most = fmaxf(most, fabsf(__uint_as_float(word)));
      } else {
        const float2 pair = word_to_floats<T>(word);
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    return most;
  }

  float global_;
  Quotient six_global_;
  bool four_over_six_, plain_;
};

}  // namespace pykv
