// Kinds of cache element: storage size, the type that tensor cores see, and how a register of elements becomes fragments.
#pragma once

#include "attention/cuda/plan.h"
#include "core/dtype.h"
#include "cuda/int8.cuh"
#include "cuda/types.cuh"

namespace pykv::attention {

template <class T>
struct Element16 {
  using Mma = T;
  static constexpr int kBytes = 2;
};

// Becomes a half on its way into shared memory.
struct ElementNvfp4 {
  using Mma = half;
  static constexpr int kBytes = 2;  // there
};

template <KvFormat kFormat>
struct Element8 {
  using Mma = half;
  static constexpr int kBytes = 1;

  // Four codes to two pairs of halves.
  static __device__ void widen(uint32_t codes, uint32_t& low, uint32_t& high) {
    if constexpr (kFormat == KvFormat::kE5M2) {
      spread(codes, low, high);
    } else if constexpr (kFormat == KvFormat::kInt8) {
      half2 pairs[2];
      int8x4_to_half2x2(codes, pairs[0], pairs[1]);
      low = reinterpret_cast<const uint32_t&>(pairs[0]);
      high = reinterpret_cast<const uint32_t&>(pairs[1]);
    } else {
#if __CUDA_ARCH__ >= 890
      asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
          : "=r"(low), "=r"(high)
          : "r"(codes));
#else
      spread(codes, low, high);
      low = from_e4m3(low);
      high = from_e4m3(high);
#endif
    }
  }

  // Codes of int8 in three instructions, not five: code + 128 in units of 2^-24, halves below the least normal one, which
  // tensor cores multiply exactly.
  static constexpr float kOffsetUnit = 0x1p-24f, kOffset = 128 * kOffsetUnit;
  static __device__ void widen_with_offset(uint32_t codes, uint32_t& low, uint32_t& high) {
    const uint32_t shifted = codes ^ 0x80808080u;
    low = __byte_perm(shifted, 0, 0x4140);
    high = __byte_perm(shifted, 0, 0x4342);
  }

 private:
  // Each code as the upper byte of a half: for E5M2 that is its value.
  static __device__ void spread(uint32_t codes, uint32_t& low, uint32_t& high) {
    low = __byte_perm(codes, 0, 0x1404);
    high = __byte_perm(codes, 0, 0x3424);
  }

  // E4M3 has one exponent bit less than a half: shifted by one place its value is 256 times too small, and its NaN
  // reads as 1.875.
  static __device__ uint32_t from_e4m3(uint32_t spread_codes) {
    const uint32_t magnitude = (spread_codes & 0x7f007f00u) >> 1, is_nan = 0x3f803f80u;
    const uint32_t small = (spread_codes & 0x80008000u) | magnitude, scale = 0x5c005c00u;  // 256
    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(small), reinterpret_cast<const __half2&>(scale));
    return reinterpret_cast<const uint32_t&>(value) |
           __heq2_mask(reinterpret_cast<const __half2&>(magnitude), reinterpret_cast<const __half2&>(is_nan));
  }
};

// By their kind.
template <class Element>
constexpr CacheKind kKindOf = CacheKind::k16Bits;
template <KvFormat kFormat>
constexpr CacheKind kKindOf<Element8<kFormat>> = kFormat == KvFormat::kE4M3   ? CacheKind::kE4M3
                                                 : kFormat == KvFormat::kE5M2 ? CacheKind::kE5M2
                                                                              : CacheKind::kInt8;
template <>
constexpr CacheKind kKindOf<ElementNvfp4> = CacheKind::kNvfp4;

template <class Element>
constexpr bool kIsCommon = is_common(kKindOf<Element>);

}  // namespace pykv::attention
