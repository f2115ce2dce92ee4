// Blocks of nvfp4 (core/nvfp4.h) on the CPU: sixteen elements to eight bytes and a scale.
//
// The code is a staircase over the bits of a 16-bit element; blocks whose scales differ by a power of two have it shifted by as
// many binades, so that eight tables do, made as cpu/encode.h does it: (bits + d) >> kPart is the code, with a d for each quarter
// of a binade.  No division, no conversion, no product.  First the largest of up to 256 blocks by folding vectors, then all
// their scales, then their codes, two blocks a vector, a line of 128 at once: each of these steps alone has enough to do at
// once, while one block after the other would wait for its own.
#pragma once

#include "cpu/encode.h"
#include "cpu/nvfp4_scales.h"
#include "cpu/pieces.h"
#include "cpu/prefetch.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// The lower halves of eight bytes as four bytes.
inline uint32_t pack_nibbles(uint64_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// Sixteen elements times r, as codes.
template <class T>
inline void store_e2m1(uint8_t* codes, const T* from, float r) {
  uint8_t bytes[kNvfp4Block];
  for (int i = 0; i < kNvfp4Block; i += kWidth) {
    const Floats x = load(from + i);
    const Words signs = __builtin_bit_cast(Words, x) >> 28 & 8u;  // the product of 0 and infinity has any sign
    const Bytes some = narrow_to_bytes(narrow_e2m1_magnitude<Floats, Words>(x * r) | signs);
    __builtin_memcpy(bytes + i, &some, sizeof some);
  }
  for (int i = 0; i < 2; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + 8 * i, 8);
    const uint32_t packed = pack_nibbles(eight);
    __builtin_memcpy(codes + 4 * i, &packed, 4);
  }
}

// The scales of as many blocks as a vector has lanes, and by what their elements are multiplied.
inline void find_nvfp4_scales(uint8_t* scales, float* reciprocals, Floats largest, float global) {
  const Words magnitudes = narrow_e4m3<Floats, Words>(largest / splat(kNvfp4Largest * global)) & 0x7fu;
  const Words rounded = magnitudes | (__builtin_signbit(global) ? 0x80u : 0u);  // that of a NaN is the processor's
  const Words all = largest == 0.0f ? Words{} : rounded;
  const Floats r = 1.0f / (widen_e4m3<Floats>(all) * global);
  store(reciprocals, (all & 0x7fu) == 0u ? Floats{} : r);
  const Bytes bytes = narrow_to_bytes(all);
  __builtin_memcpy(scales, &bytes, sizeof bytes);
}

// Blocks come in fours.
inline constexpr int kNvfp4Four = 4 * kNvfp4Block;      // elements,
inline constexpr int kNvfp4FourCodes = kNvfp4Four / 2;  // bytes,
inline constexpr int64_t kNvfp4Fours = 8;               // and so many fours at once
constexpr int64_t nvfp4_whole(int64_t fours) { return (fours + kNvfp4Fours - 1) / kNvfp4Fours * kNvfp4Fours; }

// Neighbouring fours, row after row.
template <class T>
struct Nvfp4Rows {
  const T* from;
  int64_t rows, stride, fours;  // elements from row to row, fours in a row

  int64_t size() const { return rows * fours; }
  // Where `n` of them from `first` on are.
  void find(const T** places, int64_t first, int64_t n) const {
    const T* row = from + first / fours * stride;
    for (int64_t i = first % fours; n > 0; i = 0, row += stride) {
      const int64_t some = fours - i < n ? fours - i : n;
      for (int64_t k = 0; k < some; ++k) places[k] = row + (i + k) * kNvfp4Four;
      places += some, n -= some;
    }
  }
};

// n fours, to 32 bytes of codes and four scales each.
template <class T>
inline void store_nvfp4(uint8_t* codes, uint8_t* scales, const T* const* from, int64_t n, float global) {
  constexpr int kAtOnce = kWidth / 4;  // fours
  for (; n > 0; n -= kAtOnce, from += kAtOnce, codes += kAtOnce * kNvfp4FourCodes, scales += 4 * kAtOnce) {
    const int blocks = n < kAtOnce ? 4 * static_cast<int>(n) : kWidth;
    float largest[kWidth] = {}, reciprocals[kWidth];
    for (int b = 0; b < blocks; ++b) {
      Floats most{};
      for (int i = 0; i < kNvfp4Block; i += kWidth) {
        const Floats x = load(from[b / 4] + b % 4 * kNvfp4Block + i);
        most = max(x < 0.0f ? -x : x, most);  // NaN is not counted
      }
      largest[b] = max(most);
    }
    uint8_t found[kWidth];
    find_nvfp4_scales(found, reciprocals, load(largest), global);
    __builtin_memcpy(scales, found, static_cast<size_t>(blocks));
    for (int b = 0; b < blocks; ++b)
      store_e2m1(codes + b * (kNvfp4Block / 2), from[b / 4] + b % 4 * kNvfp4Block, reciprocals[b]);
  }
}

// Blocks below one global scale; of so many elements in all, for few are not worth tables.
template <class T>
class Nvfp4Encoder {
 public:
  Nvfp4Encoder(float global, int64_t) : global_(global) {}

  // What lies `ahead` elements of them is asked for.  There is room for nvfp4_whole(size()) fours.
  void operator()(uint8_t* codes, uint8_t* scales, const Nvfp4Rows<T>& rows, int64_t) const {
    constexpr int64_t kSome = 64;
    const T* from[kSome];
    for (int64_t first = 0, n; first < rows.size(); first += n) {
      n = rows.size() - first < kSome ? rows.size() - first : kSome;
      rows.find(from, first, n);
      store_nvfp4(codes + first * kNvfp4FourCodes, scales + 4 * first, from, n, global_);
    }
  }

 private:
  float global_;
};

#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class Nvfp4Encoder<T> {
  static constexpr int64_t kWorthTables = 1 << 14;
  static constexpr int64_t kMost = 8 * kNvfp4Fours;  // fours between two steps
  static constexpr int kMantissa = __is_same(T, bf16) ? 7 : 10, kPart = kMantissa - 2;
  static constexpr int16_t kInfinity = ((1 << (15 - kMantissa)) - 1) << kMantissa;
  static constexpr int kOne = 0x38;      // the scale 1; the next seven have the other mantissas
  static constexpr int kLargest = 0x7e;  // what larger ones become, too

 public:
  Nvfp4Encoder(float global, int64_t elements)
      : global_(global), scale_of_(kNvfp4Largest * global, elements), tables_(elements >= kWorthTables && build()) {}

  void operator()(uint8_t* codes, uint8_t* scales, const Nvfp4Rows<T>& rows, int64_t ahead) const {
    const T* from[kMost];
    for (int64_t first = 0, n; first < rows.size(); first += n, codes += n * kNvfp4FourCodes, scales += 4 * n) {
      n = rows.size() - first < kMost ? rows.size() - first : kMost;
      rows.find(from, first, n);
      const int64_t whole = nvfp4_whole(n);
      for (int64_t i = n; i < whole; ++i) from[i] = from[0];
      if (!tables_ || !find_scales(scales, from, whole)) {
        store_nvfp4(codes, scales, from, n, global_);
      } else {
        for (int64_t i = 0; i < whole; i += 2) {
          prefetch_bytes(from[i] + ahead, kNvfp4Four * sizeof(T));
          prefetch_bytes(from[i + 1] + ahead, kNvfp4Four * sizeof(T));
          encode(codes + i * kNvfp4FourCodes, from + i, scales + 4 * i);
        }
      }
    }
  }

 private:
  static uint32_t code_of(uint32_t bits, float r) {
    return narrow_e2m1_magnitude<float, uint32_t>(to_float(T{static_cast<uint16_t>(bits)}) * r);
  }

  // The staircase of a scale; gives the bits that it counts from, -1 if there is none.
  static int build_stairs(uint16_t* d, float r) {
    int steps[8];  // the least bits with that code
    for (uint32_t code = 1; code < 8; ++code)
      steps[code] =
          static_cast<int>(first_where(0, kInfinity, [=](uint32_t bits) { return code_of(bits, r) >= code; }));
    const int base = (steps[1] >> kPart << kPart) - (1 << kPart);
    if (base < 1 << kMantissa || steps[7] >= kInfinity) return -1;
    for (int part = 0, code = 0; part < 32; ++part) {
      const int end = base + ((part + 1) << kPart);
      const bool steps_here = code < 7 && steps[code + 1] < end;
      // without a step the sum stays below the next multiple of 2^kPart
      const int carry = steps_here ? end - steps[code + 1] : 0;
      d[part] = static_cast<uint16_t>(((code - part) << kPart) + carry);
      code += steps_here;
    }
    return base;
  }

  bool build() {
    if (!(global_ > 0x1p-60f && global_ < 0x1p60f)) return false;
    int bases[8];
    for (int m = 0; m < 8; ++m) {
      bases[m] = build_stairs(stairs_[m], 1.0f / (to_float(e4m3{static_cast<uint8_t>(kOne + m)}) * global_));
      if (bases[m] < 0) return false;
    }
    // nothing is above the base of scale 0: all codes are 0
    of_scale_[0] = {0x7fff7fffu, 0};
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
      if (base < 1 << kMantissa || base + (24 << kPart) >= kInfinity)
        continue;  // elements are not normal numbers there
      if (least == 0) least = scale;
      most = scale;
      of_scale_[scale] = {static_cast<uint32_t>(base) * 0x10001u, static_cast<uint32_t>(mantissa)};
    }
    least_ = static_cast<uint8_t>(least);
    span_ = static_cast<uint8_t>(most - least);
    return least > 0;
  }

  // Of all blocks of n fours, a multiple of kNvfp4Fours; false where there are no tables for some of them, or NaN.
  bool find_scales(uint8_t* scales, const T* const* from, int64_t n) const {
    alignas(64) T largest[4 * kMost];
    __mmask32 nan = 0;
    for (int64_t i = 0; i < n; i += kNvfp4Fours) {
      const __m512i twice = largest_magnitudes(from + i);
      nan |= _mm512_cmpgt_epu16_mask(twice, _mm512_set1_epi16(static_cast<int16_t>(2 * kInfinity)));
      _mm512_store_si512(largest + 4 * i, _mm512_srli_epi16(twice, 1));
    }
    if (nan) return false;
    scale_of_(reinterpret_cast<e4m3*>(scales), largest, 4 * n);
    __mmask32 others = 0;
    for (int64_t i = 0; i < 4 * n; i += 32) {
      const __m256i some = load_raw<__m256i>(scales + i);
      const __m256i above = _mm256_sub_epi8(some, _mm256_set1_epi8(static_cast<char>(least_)));
      others |= _mm256_mask_cmpgt_epu8_mask(_mm256_test_epi8_mask(some, some), above,
                                            _mm256_set1_epi8(static_cast<char>(span_)));
    }
    return others == 0;
  }

  // Twice that of each block of eight fours, in their order; more than that of infinity where there is NaN.  Four times blocks
  // are folded and others brought into the place: by eights of elements, ..., the last time where they are.
  static __m512i largest_magnitudes(const T* const* from) {
    const auto twice = [](__m512i v) { return _mm512_add_epi16(v, v); };
    __m512i of_two[4], halves[2];
    for (int g = 0; g < 4; ++g) {
      __m512i four[2];  // 128 bits of each block
      for (int i = 0; i < 2; ++i) {
        const __m512i a = twice(_mm512_loadu_si512(from[2 * g + i])),
                      b = twice(_mm512_loadu_si512(from[2 * g + i] + 2 * kNvfp4Block));
        four[i] = _mm512_max_epu16(every_other_piece(a, b, false), every_other_piece(a, b, true));
      }
      of_two[g] = _mm512_max_epu16(_mm512_maskz_unpacklo_epi64(0xff, four[0], four[1]),
                                   _mm512_maskz_unpackhi_epi64(0xff, four[0], four[1]));
    }
    for (int i = 0; i < 2; ++i) {
      const __m512 a = _mm512_castsi512_ps(of_two[2 * i]), b = _mm512_castsi512_ps(of_two[2 * i + 1]);
      const __m512i even = _mm512_castps_si512(_mm512_maskz_shuffle_ps(0xffff, a, b, 0x88));
      halves[i] = _mm512_max_epu16(even, _mm512_castps_si512(_mm512_maskz_shuffle_ps(0xffff, a, b, 0xdd)));
    }
    const __m512i lower = _mm512_max_epu16(halves[0], _mm512_maskz_srli_epi32(0xffff, halves[0], 16));
    const __m512i upper = _mm512_max_epu16(halves[1], _mm512_maskz_slli_epi32(0xffff, halves[1], 16));
    const __m512i all = _mm512_mask_blend_epi16(0xaaaaaaaa, lower, upper);
    static constexpr Order kOrder;
    return _mm512_maskz_permutexvar_epi16(~__mmask32{}, load_raw<__m512i>(kOrder.lanes), all);
  }

  // Where each block's largest is after that.
  struct Order {
    uint16_t lanes[4 * kNvfp4Fours];
    constexpr Order() : lanes() {
      for (int b = 0; b < 4 * kNvfp4Fours; ++b) {
        const int piece = b % 4, four = b / 4;  // of which every second pair is in the upper half of 32 bits
        lanes[b] = static_cast<uint16_t>(2 * (4 * piece + four % 4) + four / 4);
      }
    }
  };

  // Two fours to a line.
  void encode(uint8_t* codes, const T* const* from, const uint8_t* scales) const {
    const __m512i first = encode_four(from[0], scales), second = encode_four(from[1], scales + 4);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_packus_epi16(first, second);
    _mm512_storeu_si512(codes, _mm512_maskz_permutexvar_epi32(0xffff, order, bytes));
  }

  // Bytes in 16 bits; of 128 bits half are the first two blocks'.
  __m512i encode_four(const T* from, const uint8_t* scales) const {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 2 * kNvfp4Block);
    // bytes with the code uppermost, and others with the sign
    const __m512i steps = _mm512_packus_epi16(above_base(a, scales), above_base(b, scales + 2));
    const __m512i signs = _mm512_packs_epi16(a, b);
    // 0xe4 is c ? a : b
    const __m512i codes =
        _mm512_ternarylogic_epi32(signs, _mm512_srli_epi16(steps, 1), _mm512_set1_epi8(static_cast<char>(0x80)), 0xe4);
    return _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4), _mm512_srli_epi16(codes, 8), _mm512_set1_epi16(0x0f),
                                     0xe4);
  }

  // Of two blocks: a byte in 16 bits, whose upper three are the magnitude's code.
  __m512i above_base(__m512i bits, const uint8_t* scales) const {
    const OfScale &low = of_scale_[scales[0]], &high = of_scale_[scales[1]];
    const __m512i base =
        _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(low.base)), 0xff00, static_cast<int>(high.base));
    const __m512i above = _mm512_subs_epu16(_mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)), base);
    const __m512i part = _mm512_srli_epi16(above, kPart);
    const __m512i place = _mm512_mask_add_epi16(part, 0xffff0000, part, _mm512_set1_epi16(32));
    const __m512i d = _mm512_permutex2var_epi16(load_raw<__m512i>(stairs_[low.stairs]), place,
                                                load_raw<__m512i>(stairs_[high.stairs]));
    const __m512i sum = _mm512_add_epi16(above, d);
    return kPart == 5 ? sum : _mm512_srli_epi16(sum, kPart - 5);
  }

  // The bits that the staircase of a scale counts from, twice, and which one it is.
  struct OfScale {
    uint32_t base, stairs;
  };

  float global_;
  Encoder<T, e4m3> scale_of_;
  OfScale of_scale_[128];
  alignas(64) uint16_t stairs_[8][32];
  uint8_t least_, span_;  // of the scales that are looked up
  bool tables_;
};
#endif

}  // namespace pykv::PYKV_ISA
