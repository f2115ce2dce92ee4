// Codes of nvfp4 blocks (core/nvfp4.h) of 16-bit elements by tables, with AVX-512.
//
// The code is a staircase over the bits of an element; blocks whose scales differ by a power of two have it shifted by as many
// binades, so that eight staircases do, made as cpu/encode.h does it.  No division, no conversion, no product.
#pragma once

#include "cpu/encode.h"
#include "cpu/nvfp4_scales.h"
#include "cpu/prefetch.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {

// Blocks come in fours.
inline constexpr int kNvfp4Four = 4 * kNvfp4Block;      // elements,
inline constexpr int kNvfp4FourCodes = kNvfp4Four / 2;  // bytes,
inline constexpr int64_t kNvfp4Fours = 8;               // and so many fours at once
constexpr int64_t nvfp4_whole(int64_t fours) { return (fours + kNvfp4Fours - 1) / kNvfp4Fours * kNvfp4Fours; }

#if defined(__AVX512BW__)
// What the staircases below a positive global scale have in common.
template <class T>
class Nvfp4Steps {
 public:
  static constexpr int kMantissa = __is_same(T, bf16) ? 7 : 10;
  static constexpr int kInfinity = ((1 << (15 - kMantissa)) - 1) << kMantissa;
  static constexpr int kMantissas = 8, kScales = 128, kPowers = 256;  // of e4m3; of e8m0
  static constexpr int kAboveAll = 0x7fff;                            // nothing has bits beyond these

  explicit Nvfp4Steps(float global) : global_(global) {}

  bool usable() const { return global_ > 0x1p-60f && global_ < 0x1p60f; }

  // Of the scale with that mantissa that is at least 1 and less than 2: the least bits with each code.
  void find(int mantissa, int (&steps)[8]) const {
    const float r = 1.0f / (to_float(e4m3{static_cast<uint8_t>(kOne + mantissa)}) * global_);
    for (uint32_t code = 1; code < 8; ++code)
      steps[code] = static_cast<int>(first_where(0, kInfinity, [=](uint32_t bits) {
        return narrow_e2m1_magnitude<float, uint32_t>(to_float(T{static_cast<uint16_t>(bits)}) * r) >= code;
      }));
  }

  // Where the staircase of each scale begins, and its mantissa: of the first one, whose codes are all 0, beyond all.
  struct OfScale {
    int base = kAboveAll, mantissa = 0;
  };
  // From those of find's scales; which are for blocks whose elements are normal numbers, from one to another, is kept.  False
  // if there are none.
  bool spread(const int (&bases)[kMantissas], int span, OfScale (&of_scale)[kScales]) {
    int least = 0, most = 0;
    for (int scale = 1; scale < kLargest; ++scale) {
      // the mantissa and the exponent of the scale, subnormal or not
      int mantissa = scale & 7, exponent = scale >> 3;
      if (exponent == 0) {
        exponent = 1;
        while (mantissa < 8) mantissa *= 2, --exponent;
        mantissa -= 8;
      }
      const int base = bases[mantissa] + (exponent - (kOne >> 3)) * (1 << kMantissa);
      if (base < 1 << kMantissa || base + span >= kInfinity) continue;
      if (least == 0) least = scale;
      most = scale;
      of_scale[scale] = {base, mantissa};
    }
    least_ = static_cast<uint8_t>(least);
    span_ = static_cast<uint8_t>(most - least);
    return least > 0;
  }

  // The same of scales that are powers of two, by their exponents as e8m0 has them, from that of the scale 1.
  bool spread_powers(int one, int span, OfScale (&of_scale)[kPowers]) {
    int least = 0, most = 0;
    for (int exponent = 1; exponent < kPowers - 1; ++exponent) {
      const int base = one + (exponent - 127) * (1 << kMantissa);
      if (base < 1 << kMantissa || base + span >= kInfinity) continue;
      if (least == 0) least = exponent;
      most = exponent;
      of_scale[exponent] = {base, 0};
    }
    least_ = static_cast<uint8_t>(least);
    span_ = static_cast<uint8_t>(most - least);
    return least > 0;
  }

  // Whether all of n scales, a multiple of 32, are among these, or 0.
  bool have(const uint8_t* scales, int64_t n) const {
    __mmask32 others = 0;
    for (int64_t i = 0; i < n; i += 32) {
      const __m256i some = load_raw<__m256i>(scales + i);
      const __m256i above = _mm256_sub_epi8(some, _mm256_set1_epi8(static_cast<char>(least_)));
      others |= _mm256_mask_cmpgt_epu8_mask(_mm256_test_epi8_mask(some, some), above,
                                            _mm256_set1_epi8(static_cast<char>(span_)));
    }
    return others == 0;
  }
  bool have(Words scales) const {
    const __m512i some = __builtin_bit_cast(__m512i, scales), above = __builtin_bit_cast(__m512i, scales - least_);
    return _mm512_mask_cmpgt_epu32_mask(_mm512_test_epi32_mask(some, some), above, _mm512_set1_epi32(span_)) == 0;
  }

 private:
  static constexpr int kOne = 0x38;      // the scale 1; the next seven have the other mantissas
  static constexpr int kLargest = 0x7e;  // what larger ones become, too

  float global_;
  uint8_t least_ = 0, span_ = 0;
};

// (bits + d) >> kPart is the code, with a d for each quarter of a binade; two blocks a vector, a line of 128 elements at once.
template <class T>
class Nvfp4Stairs {
 public:
  explicit Nvfp4Stairs(float global) : steps_(global) {}

  // powers: scales are e8m0, not e4m3.
  bool build(bool powers = false) {
    if (!steps_.usable()) return false;
    int bases[Steps::kMantissas];
    for (int m = 0; m < Steps::kMantissas; ++m) {
      int steps[8];
      steps_.find(m, steps);
      const int base = (steps[1] >> kPart << kPart) - (1 << kPart);
      if (base < 1 << Steps::kMantissa || steps[7] >= Steps::kInfinity) return false;
      for (int part = 0, code = 0; part < kParts; ++part) {
        const int end = base + ((part + 1) << kPart);
        const bool steps_here = code < 7 && steps[code + 1] < end;
        // without a step the sum stays below the next multiple of 2^kPart
        const int carry = steps_here ? end - steps[code + 1] : 0;
        stairs_[m][part] = static_cast<uint16_t>(((code - part) << kPart) + carry);
        code += steps_here;
      }
      bases[m] = base;
    }
    const auto keep = [this](const auto& of_scale) {
      int i = 0;
      for (const auto& scale : of_scale)
        of_scale_[i++] = {static_cast<uint32_t>(scale.base) * 0x10001u, static_cast<uint32_t>(scale.mantissa)};
    };
    if (powers) {
      typename Steps::OfScale of_scale[Steps::kPowers];
      if (!steps_.spread_powers(bases[0], 24 << kPart, of_scale)) return false;
      keep(of_scale);
      return true;
    }
    typename Steps::OfScale of_scale[Steps::kScales];
    if (!steps_.spread(bases, 24 << kPart, of_scale)) return false;
    keep(of_scale);
    return true;
  }
  bool have(const uint8_t* scales, int64_t n) const { return steps_.have(scales, n); }
  bool have(Words scales) const { return steps_.have(scales); }

  // Of n lines of 128 neighbours in blocks of 32, whose scales are powers of two: one staircase is that of all.
  void of_powers(uint8_t* codes, const T* from, int64_t n, const uint32_t* exponents, int64_t ahead, bool past) const {
    const __m512i stairs = load_raw<__m512i>(stairs_[0]);
    const auto above = [&](const T* at, uint32_t exponent) {
      const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi16(0x7fff));
      const __m512i base = _mm512_set1_epi32(static_cast<int>(of_scale_[exponent].base));
      return code_byte(_mm512_subs_epu16(bits, base),
                       [=](__m512i part) { return _mm512_maskz_permutexvar_epi16(~__mmask32{}, part, stairs); });
    };
    for (int64_t i = 0; i < n; ++i, codes += kLine, from += 4 * kPair, exponents += 4) {
      const T *b = from + kPair, *c = b + kPair, *d = c + kPair;
      prefetch_bytes(from + ahead, 4 * kPair * sizeof(T));
      const __m512i first =
          packed(_mm512_loadu_si512(from), _mm512_loadu_si512(b), above(from, exponents[0]), above(b, exponents[1]));
      const __m512i second =
          packed(_mm512_loadu_si512(c), _mm512_loadu_si512(d), above(c, exponents[2]), above(d, exponents[3]));
      store_line(codes, first, second, past);
    }
  }

  // Of n fours, an even number, with these scales; what lies `ahead` elements of them is asked for.
  template <class Scale>
  void operator()(uint8_t* codes, const T* const* from, int64_t n, const Scale* scales, int64_t ahead,
                  bool past) const {
    for (int64_t i = 0; i < n; i += 2, codes += kLine, scales += 8) {
      prefetch_bytes(from[i] + ahead, kNvfp4Four * sizeof(T));
      prefetch_bytes(from[i + 1] + ahead, kNvfp4Four * sizeof(T));
      encode(codes, from + i, scales, past);
    }
  }

 private:
  using Steps = Nvfp4Steps<T>;
  static constexpr int kPart = Steps::kMantissa - 2, kParts = 32;

  // Two fours to a line.
  template <class Scale>
  void encode(uint8_t* codes, const T* const* from, const Scale* scales, bool past) const {
    store_line(codes, encode_four(from[0], scales), encode_four(from[1], scales + 4), past);
  }
  static void store_line(uint8_t* codes, __m512i first, __m512i second, bool past) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_packus_epi16(first, second);
    store_raw(codes, _mm512_maskz_permutexvar_epi32(0xffff, order, bytes), past);
  }

  // Bytes in 16 bits; of 128 bits half are the first two blocks'.
  template <class Scale>
  __m512i encode_four(const T* from, const Scale* scales) const {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 2 * kNvfp4Block);
    return packed(a, b, above_base(a, scales), above_base(b, scales + 2));
  }
  // x, y: bytes in 16 bits with the codes of a and b uppermost.
  static __m512i packed(__m512i a, __m512i b, __m512i x, __m512i y) {
    const __m512i steps = _mm512_packus_epi16(x, y), signs = _mm512_packs_epi16(a, b);
    // 0xe4 is c ? a : b
    const __m512i codes =
        _mm512_ternarylogic_epi32(signs, _mm512_srli_epi16(steps, 1), _mm512_set1_epi8(static_cast<char>(0x80)), 0xe4);
    return _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4), _mm512_srli_epi16(codes, 8), _mm512_set1_epi16(0x0f),
                                     0xe4);
  }

  // A byte in 16 bits, whose upper three are the magnitude's code.
  template <class ShiftOf>
  static __m512i code_byte(__m512i above, ShiftOf shift_of) {
    const __m512i sum = _mm512_add_epi16(above, shift_of(_mm512_srli_epi16(above, kPart)));
    return kPart == 5 ? sum : _mm512_srli_epi16(sum, kPart - 5);
  }

  // The same of two blocks.
  template <class Scale>
  __m512i above_base(__m512i bits, const Scale* scales) const {
    const OfScale &low = of_scale_[scales[0] & 0x7fu], &high = of_scale_[scales[1] & 0x7fu];
    const __m512i base =
        _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(low.base)), 0xff00, static_cast<int>(high.base));
    return code_byte(_mm512_subs_epu16(_mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)), base), [&](__m512i part) {
      const __m512i place = _mm512_mask_add_epi16(part, 0xffff0000, part, _mm512_set1_epi16(32));
      return _mm512_permutex2var_epi16(load_raw<__m512i>(stairs_[low.stairs]), place,
                                       load_raw<__m512i>(stairs_[high.stairs]));
    });
  }

  // The bits that the staircase of a scale counts from, twice, and which one it is.
  struct OfScale {
    uint32_t base, stairs;
  };

  Steps steps_;
  OfScale of_scale_[Steps::kPowers];
  alignas(64) uint16_t stairs_[Steps::kMantissas][kParts];
};

#endif

}  // namespace pykv::PYKV_ISA
