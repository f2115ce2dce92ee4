// Blocks of nvfp4 (core/nvfp4.h) on the CPU: sixteen elements to eight bytes and a scale.
//
// With AVX-512 codes of 16-bit elements are looked up (cpu/nvfp4_stairs.h).  First the largest of up to 256 blocks by folding
// vectors, then all their scales, then their codes, a line of 128 at once: each of these steps alone has enough to do at once,
// while one block after the other would wait for its own.
#pragma once

#include "cpu/encode.h"
#include "cpu/nvfp4_stairs.h"
#include "cpu/pieces.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// The lower halves of eight bytes as four bytes.
inline uint32_t pack_nibbles(uint64_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}

// Those of sixteen bytes as eight.
inline void pack_sixteen(uint8_t* to, const uint8_t* bytes) {
  for (int i = 0; i < 2; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + 8 * i, 8);
    const uint32_t packed = pack_nibbles(eight);
    __builtin_memcpy(to + 4 * i, &packed, 4);
  }
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
  pack_sixteen(codes, bytes);
}

// The scales of as many blocks as a vector has lanes, and by what their elements are multiplied.
inline void find_nvfp4_scales(uint8_t* scales, float* reciprocals, Floats largest, float global,
                              float code = kNvfp4Largest) {
  const Words magnitudes = narrow_e4m3<Floats, Words>(largest / splat(code * global)) & 0x7fu;
  const Words rounded = magnitudes | (__builtin_signbit(global) ? 0x80u : 0u);  // that of a NaN is the processor's
  const Words all = largest == 0.0f ? Words{} : rounded;
  const Floats r = 1.0f / (widen_e4m3<Floats>(all) * global);
  store(reciprocals, (all & 0x7fu) == 0u ? Floats{} : r);
  const Bytes bytes = narrow_to_bytes(all);
  __builtin_memcpy(scales, &bytes, sizeof bytes);
}

// The sum of the squares of what a block is wrong by.
template <class T>
inline float nvfp4_error(const uint8_t* codes, uint8_t scale, const T* from, float global) {
  static constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float unit = to_float(e4m3{scale});
  float sum = 0.0f;
  for (int i = 0; i < kNvfp4Block; ++i) {
    const float value = kValues[codes[i / 2] >> (i % 2 * 4) & 7] * unit * global;
    const float d = __builtin_fabsf(to_float(from[i])) - value;
    sum += d * d;
  }
  return sum;
}

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
inline void store_nvfp4(uint8_t* codes, uint8_t* scales, const T* const* from, int64_t n, float global,
                        bool four_over_six) {
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
    if (!four_over_six) continue;
    find_nvfp4_scales(found, reciprocals, load(largest), global, kNvfp4Second);
    for (int b = 0; b < blocks; ++b) {
      const T* block = from[b / 4] + b % 4 * kNvfp4Block;
      uint8_t others[kNvfp4Block / 2], *own = codes + b * (kNvfp4Block / 2);
      store_e2m1(others, block, reciprocals[b]);
      if (!(nvfp4_error(others, found[b], block, global) < nvfp4_error(own, scales[b], block, global))) continue;
      __builtin_memcpy(own, others, sizeof others);
      scales[b] = found[b];
    }
  }
}

// Blocks below one global scale; of so many elements in all, for few are not worth tables.
template <class T>
class Nvfp4Encoder {
 public:
  Nvfp4Encoder(float global, int64_t, bool four_over_six) : global_(global), four_over_six_(four_over_six) {}

  // What lies `ahead` elements of them is asked for.  There is room for nvfp4_whole(size()) fours.
  void operator()(uint8_t* codes, uint8_t* scales, const Nvfp4Rows<T>& rows, int64_t) const {
    constexpr int64_t kSome = 64;
    const T* from[kSome];
    for (int64_t first = 0, n; first < rows.size(); first += n) {
      n = rows.size() - first < kSome ? rows.size() - first : kSome;
      rows.find(from, first, n);
      store_nvfp4(codes + first * kNvfp4FourCodes, scales + 4 * first, from, n, global_, four_over_six_);
    }
  }

 private:
  float global_;
  bool four_over_six_;
};

#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class Nvfp4Encoder<T> {
  static constexpr int64_t kWorthTables = 1 << 14;
  static constexpr int64_t kMost = 8 * kNvfp4Fours;  // fours between two steps
 public:
  Nvfp4Encoder(float global, int64_t elements, bool four_over_six)
      : global_(global),
        four_over_six_(four_over_six),
        scale_of_(kNvfp4Largest * global, elements),
        stairs_(global),
        tables_(elements >= kWorthTables && !four_over_six && stairs_.build()) {}

  void operator()(uint8_t* codes, uint8_t* scales, const Nvfp4Rows<T>& rows, int64_t ahead) const {
    const T* from[kMost];
    for (int64_t first = 0, n; first < rows.size(); first += n, codes += n * kNvfp4FourCodes, scales += 4 * n) {
      n = rows.size() - first < kMost ? rows.size() - first : kMost;
      rows.find(from, first, n);
      const int64_t whole = nvfp4_whole(n);
      for (int64_t i = n; i < whole; ++i) from[i] = from[0];
      if (!tables_ || !find_scales(scales, from, whole)) {
        store_nvfp4(codes, scales, from, n, global_, four_over_six_);
      } else {
        stairs_(codes, from, whole, scales, ahead, false);
      }
    }
  }

 private:
  // Of all blocks of n fours, a multiple of kNvfp4Fours; false where there are no tables for some of them, or NaN.
  bool find_scales(uint8_t* scales, const T* const* from, int64_t n) const {
    alignas(64) T largest[4 * kMost];
    __mmask32 nan = 0;
    for (int64_t i = 0; i < n; i += kNvfp4Fours) {
      const __m512i twice = largest_magnitudes(from + i);
      nan |= _mm512_cmpgt_epu16_mask(twice, _mm512_set1_epi16(static_cast<int16_t>(2 * Nvfp4Steps<T>::kInfinity)));
      _mm512_store_si512(largest + 4 * i, _mm512_srli_epi16(twice, 1));
    }
    if (nan) return false;
    scale_of_(reinterpret_cast<e4m3*>(scales), largest, 4 * n);
    return stairs_.have(scales, 4 * n);
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

  float global_;
  bool four_over_six_;
  Encoder<T, e4m3> scale_of_;
  Nvfp4Stairs<T> stairs_;
  bool tables_;
};
#endif

}  // namespace pykv::PYKV_ISA
