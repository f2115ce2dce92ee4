// Codes of a packed weight on the CPU: vectors of words (gemm/packed_weight.h) to numbers.
#pragma once

#include "cpu/code_table.h"
#include "cpu/simd.h"
#include "gemm/packed_weight.h"

namespace pykv::PYKV_ISA {

// Four neighbours in memory, again and again.
inline Floats repeat4(const float* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(from));
#elif defined(__AVX2__)
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
#else
  return load(from);
#endif
}

// Of every four lanes, lane kLane four times.
template <int kLane>
inline Floats spread4(Floats v) {
#if defined(__AVX512F__)
  return _mm512_maskz_permute_ps(0xffff, v, kLane * 0x55);
#elif defined(__AVX2__)
  return _mm256_permute_ps(v, kLane * 0x55);
#else
  return __builtin_shufflevector(v, v, kLane, kLane, kLane, kLane);
#endif
}

// An entry of 16 for each code of four bits.
class TableCodes {
 public:
  static constexpr int kPlanes = 1;
  static constexpr bool kQuickPairs = true;    // so that two products with pairs take less than those with floats
  static constexpr bool kQuickFloats = false;  // by way of pairs, which are exact

  explicit TableCodes(const float (&table)[16]) {
#if defined(__AVX512F__)
    table_ = load(table);
#else
    __builtin_memcpy(table_, table, sizeof(table_));
#endif
#if defined(__AVX512BF16__)
    bf16 pairs[32];
    for (int i = 0; i < 32; ++i) pairs[i] = from_float<bf16>(table[i % 16]);
    pairs_ = _mm512_loadu_si512(pairs);
#endif
  }

  static constexpr int shift(int half, int h) { return 4 * (half + 2 * h); }

  // Element e = 0 of a pair; e = 1 lies 16 bits above.
  Floats element(Words words, int from) const {
#if defined(__AVX512F__)
    const __m512i index =
        _mm512_maskz_srli_epi32(0xffff, __builtin_bit_cast(__m512i, words), static_cast<unsigned>(from));
    return _mm512_maskz_permutexvar_ps(0xffff, index, table_);  // looks at four bits
#elif defined(__AVX2__)
    const __m256i index = __builtin_bit_cast(__m256i, words >> from);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table_), index);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table_ + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
#else
    Floats v;
    for (int i = 0; i < kWidth; ++i) v[i] = table_[words[i] >> from & 15];
    return v;
#endif
  }

#if defined(__AVX512BF16__)
  // What codes stand for, as bytes, kOffset too much: of four columns of a row each.
  static constexpr bool kHasOctets = true;
  static constexpr int kOffset = 8;
  bool has_octets() const { return table_[0] == -8.0f && table_[15] == 7.0f; }
  __m512i octets(const uint32_t* words, int half) const {
    const auto w = load_raw<__m512i>(words);
    return _mm512_and_si512(half ? _mm512_maskz_srli_epi32(0xffff, w, 4) : w, _mm512_set1_epi8(15));
  }

  __m512bh pair(Words words, int from) const {
    const __m512i index =
        _mm512_maskz_srli_epi32(0xffff, __builtin_bit_cast(__m512i, words), static_cast<unsigned>(from));
    return __builtin_bit_cast(__m512bh,
                              _mm512_permutexvar_epi16(index, pairs_));  // looks at five bits: twice the table
  }
#endif

 private:
#if defined(__AVX512F__)
  Floats table_;
#else
  float table_[16];
#endif
#if defined(__AVX512BF16__)
  __m512i pairs_;
#endif
};

// A byte each.
template <CodeKind kKind>
class ByteCodes {
 public:
  static constexpr int kPlanes = 2;
  static constexpr bool kQuickPairs = kKind == CodeKind::kE4M3, kQuickFloats = kQuickPairs;

  explicit ByteCodes(const float (&)[16]) {}

  static constexpr int shift(int half, int) { return 8 * half; }

  Floats element(Words words, int from) const {
    if constexpr (kKind == CodeKind::kE4M3) {
      return widen_e4m3<Floats>((words >> from) & 0xffu);
    } else {
      return converted(__builtin_bit_cast(Integers, (words >> from) & 0xffu) - 128);
    }
  }

#if defined(__AVX512BF16__)
  static constexpr bool kHasOctets = kKind == CodeKind::kUint8;
  static constexpr int kOffset = 128;
  bool has_octets() const { return true; }
  __m512i octets(const uint32_t* words, int half) const {
    const auto first = load_raw<__m512i>(words), second = load_raw<__m512i>(words + 128);
    const __m512i even = _mm512_set1_epi16(0xff);
    constexpr int kChoose = 0xca;  // a ? b : c
    return half ? _mm512_ternarylogic_epi32(even, _mm512_maskz_srli_epi32(0xffff, first, 8), second, kChoose)
                : _mm512_ternarylogic_epi32(even, first, _mm512_maskz_slli_epi32(0xffff, second, 8), kChoose);
  }

  // All numbers are exact in bf16.
  __m512bh pair(Words words, int from) const {
    if constexpr (kKind == CodeKind::kE4M3) {
      // Tables know the numbers of both halves at once: the compiler looks them up a single time.
      using Halfwords32 = uint16_t __attribute__((vector_size(64)));
      const auto bytes = table_(__builtin_bit_cast(__m512i, words));
      const auto low = __builtin_bit_cast(Halfwords32, bytes.low), high = __builtin_bit_cast(Halfwords32, bytes.high);
      return __builtin_bit_cast(__m512bh, from == 0 ? (low & 0xff) | high << 8 : low >> 8 | (high & 0xff00));
    }
    // What is cut off is zero.
    const __m512i low = __builtin_bit_cast(__m512i, __builtin_bit_cast(Words, element(words, from)) >> 16);
    const __m512i high = __builtin_bit_cast(__m512i, element(words, from + 16));
    return __builtin_bit_cast(__m512bh, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
  }

 private:
  const CodeTable table_ = bf16_table<e4m3>();
#endif
};

// What multiplies the sums over groups: 16 rows times 4 steps, in lanes as those of the codes.
class Factors {
 public:
  Factors(const PackedWeight& weight, float global)
      : w_(weight), global_(global), groups_(weight.groups()), supers_((weight.padded_k + 255) / 256) {}

  // `part`: which vector of the 32 of a place in 32 rows, [g][r][half]
  Floats scale(int64_t rows32, int64_t group, int64_t column, int part) const {
    const int64_t at = (rows32 * groups_ + group) * 32 + part * kWidth;
    const uint8_t* const p = w_.scales + at * bytes_of(w_.scales_kind);
    switch (w_.scales_kind) {
      case ScaleKind::kF16:
        return load(reinterpret_cast<const f16*>(p)) * global_;
      case ScaleKind::kBF16:
        return load(reinterpret_cast<const bf16*>(p)) * global_;
      case ScaleKind::kF32:
        return load(reinterpret_cast<const float*>(p)) * global_;
      case ScaleKind::kE4M3:
        return load(reinterpret_cast<const e4m3*>(p)) * global_;
      case ScaleKind::kE8M0: {
        const Words bits = widen(load_raw<Bytes>(p));
        return __builtin_bit_cast(Floats, bits ? bits << 23 : Words{} + 0x00400000u) * global_;
      }
      case ScaleKind::kF16U8:
        return load(super(w_.supers, rows32, column, part)) *
               converted(__builtin_bit_cast(Integers, widen(load_raw<Bytes>(p)))) * global_;
      default:
        return load(super(w_.supers, rows32, column, part)) * load(reinterpret_cast<const i8*>(p)) * global_;
    }
  }

  Floats minimum(int64_t rows32, int64_t group, int64_t column, int part, Floats scale) const {
    const int64_t at = (rows32 * groups_ + group) * 32 + part * kWidth;
    const uint8_t* const p = w_.minima + at * bytes_of(w_.minima_kind);
    switch (w_.minima_kind) {
      case MinimumKind::kZero:
        return scale * (w_.offset - converted(__builtin_bit_cast(Integers, widen(load_raw<Bytes>(p)))));
      case MinimumKind::kF16:
        return scale * w_.offset + load(reinterpret_cast<const f16*>(p));
      case MinimumKind::kF32:
        return scale * w_.offset + load(reinterpret_cast<const float*>(p));
      default:
        return scale * w_.offset - load(super(w_.lows, rows32, column, part)) *
                                       converted(__builtin_bit_cast(Integers, widen(load_raw<Bytes>(p))));
    }
  }

 private:
  const f16* super(const uint8_t* of, int64_t rows32, int64_t column, int part) const {
    return reinterpret_cast<const f16*>(of) + (rows32 * supers_ + column / 256) * 32 + part * kWidth;
  }

  const PackedWeight& w_;
  float global_;
  int64_t groups_, supers_;
};

}  // namespace pykv::PYKV_ISA
