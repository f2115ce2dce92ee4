// Rows of numbers to codes by one factor or one scale, of a kind that is known at run time (core/codes.h).
#pragma once

#include "core/codes.h"
#include "cpu/encode.h"
#include "cpu/largest.h"
#include "cpu/quantise.h"

namespace pykv::PYKV_ISA {

// int8 of numbers without their fractions; and of halves rounded away from zero.
struct TruncatedInt8 {
  int8_t bits;
};
inline Floats within_int8(Floats v) { return greater(lesser(v == v ? v : Floats{}, splat(127.0f)), splat(-128.0f)); }
inline Words quantised(TruncatedInt8, Floats v) {
  return __builtin_bit_cast(Words, __builtin_convertvector(within_int8(v), Integers));
}
struct AwayInt8 {
  int8_t bits;
};
inline Words quantised(AwayInt8, Floats v) {
  // A half more without its fraction; of that half less one unit in the last place, since else the number next to a half became 1.
  const Floats within = within_int8(v);
  const Words half = (__builtin_bit_cast(Words, within) & 0x80000000u) | 0x3effffffu;
  return __builtin_bit_cast(Words, __builtin_convertvector(within + __builtin_bit_cast(Floats, half), Integers));
}

// The lowest byte of a float's bits.
struct LowByte {
  uint8_t bits;
};
inline Words quantised(LowByte, Floats v) { return __builtin_bit_cast(Words, v); }

template <class Code, class T>
[[gnu::noinline]] void multiply_to_codes(void* to, const T* from, int64_t n, float factor) {
  each_pair(0, n, [=](int64_t i, int64_t count) {
    store_quantised(static_cast<Code*>(to) + i, load_pair<T>(from + i, count) * factor, count);
  });
}
template <class Code, class T>
[[gnu::noinline]] void divide_to_codes(void* to, const T* from, int64_t n, const Divisor& by) {
  each_pair(0, n, [=](int64_t i, int64_t count) {
    store_quantised(static_cast<Code*>(to) + i, load_pair<T>(from + i, count) / by, count);
  });
}

#if defined(__AVX512BW__)
// E4M3 of bf16 times a positive number: as quantised has it, by magnitudes, with the signs of 32 at once.  26 instructions, 10 of
// which round two vectors.
template <bool kInside>
[[gnu::always_inline]] inline void multiply_to_e4m3(void* to, const bf16* from, int64_t n, float factor) {
  const auto code = [=](__m512i bits) {
    const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(bits), splat(factor));
    const __m512 within = kInside ? product : _mm512_maskz_min_ps(0xffff, product, splat(448.0f));  // NaN becomes 448
    return __builtin_bit_cast(__m512i, narrow_finite<3, 7, 8, Floats, Words>(__builtin_bit_cast(Words, within)));
  };
  store_words<false>(static_cast<e4m3*>(to), from, n, false, [=](__m512i bits) {
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    const __m512i even = code(_mm512_maskz_slli_epi32(0xffff, magnitude, 16));
    const __m512i odd = code(_mm512_and_si512(magnitude, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    const __m512i codes = _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_maskz_slli_epi32(0xffff, odd, 16));
    const __mmask32 number = kInside ? ~__mmask32{} : _mm512_cmple_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    const __m512i sign = _mm512_maskz_srli_epi16(number, bits, 8);
    return _mm512_ternarylogic_epi32(sign, codes, _mm512_set1_epi16(-128), 0xe4);
  });
}

// E4M3 of bf16 times one factor where codes are normal: (bits + d) >> 4 is the magnitude's, with a d for each 32nd of a binade, as
// cpu/encode.h has it.  Made by a hundred instructions.
class NormalE4M3 {
 public:
  explicit NormalE4M3(float factor) {
    const uint32_t bits = bits_of(factor), exponent = bits >> 23;  // above 255 where it is negative
    if (exponent - 67u > 120u) return;
    const float mantissa = float_of((bits & 0x7fffffu) | 0x3f800000u);
    least_ = static_cast<uint16_t>((248u - exponent) << 7);  // products from 2^-6 on
    for (uint32_t half = 0; half < 2; ++half) {
      Words part, first, sum{};
      for (uint32_t i = 0; i < kWidth; ++i) part[i] = 4 * (half * kWidth + i);
      for (uint32_t i = 0; i < 4; ++i) {
        const Floats number = __builtin_bit_cast(Floats, (part + i) << 16 | 0x3f800000u);
        const Words product = __builtin_bit_cast(Words, number * mantissa);
        const Words code = ((product + 0x7ffffu + (product >> 20 & 1u)) >> 20) - (127u << 3);
        if (i == 0) first = code;
        sum += code;
      }
      // Of the four numbers of a part those behind the step, sum - 4 first, carry; and the exponents of both.
      const Words d = first * 12u + sum + 12u - part + 16u * (56u + 8u * (exponent - 254u));
      const __m256i words = _mm512_maskz_cvtepi32_epi16(0xffff, __builtin_bit_cast(__m512i, d));
      __builtin_memcpy(d_ + half * kWidth, &words, sizeof words);
    }
  }

  // 64 codes; false where one is not normal, or NaN.
  bool operator()(uint8_t* to, const bf16* from) const {
    const auto all = [](int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
    const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + kPair),
                  table = load_raw<__m512i>(d_);
    const __m512i x = _mm512_and_si512(first, all(0x7fff)), y = _mm512_and_si512(second, all(0x7fff));
    const __mmask32 large = _mm512_cmpge_epu16_mask(_mm512_maskz_min_epu16(~__mmask32{}, x, y), all(least_));
    if (_mm512_mask_cmple_epu16_mask(large, _mm512_maskz_max_epu16(~__mmask32{}, x, y), all(0x7f80)) != ~__mmask32{})
      return false;
    const auto codes = [&](__m512i v) {
      const __m512i d = _mm512_maskz_permutexvar_epi16(~__mmask32{}, _mm512_srli_epi16(v, 2), table);
      return _mm512_maskz_min_epu16(~__mmask32{}, _mm512_srli_epi16(_mm512_add_epi16(v, d), 4), all(0x7e));
    };
    const __m512i bytes = _mm512_packus_epi16(codes(x), codes(y)), signs = _mm512_packs_epi16(first, second);
    store_raw(to, one_after_other(_mm512_ternarylogic_epi32(bytes, signs, _mm512_set1_epi8(-128), 0xf8)), false);
    return true;
  }

 private:
  alignas(64) uint16_t d_[kPair] = {};
  uint16_t least_ = 0xffff;
};
#endif

#if defined(__AVX512BW__)
// int8 of 16-bit numbers times a factor, plus a zero point, where all sums fit into 16 bits: integers and the zero point are added
// modulo 2^16, and need not fit alone.  kAway: halves are rounded away from zero.  20 instructions for 64 bf16 that need no zero
// point, but for what rounds.
template <bool kAway, bool kShifted, class T>
[[gnu::always_inline]] inline void int8_codes(i8* to, const T* from, int64_t n, bool past, float factor,
                                              int32_t zero_point) {
  const __m512i zero = _mm512_set1_epi16(static_cast<int16_t>(zero_point));
  const auto integers = [=](__m512 x) {
    const __m512 v = _mm512_mul_ps(x, splat(factor));
    if constexpr (!kAway) return _mm512_maskz_cvtps_epi32(0xffff, v);
    const __m512i half = _mm512_ternarylogic_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x3effffff),
                                                   _mm512_set1_epi32(INT32_MIN), 0xe4);  // c ? a : b; see AwayInt8
    return _mm512_maskz_cvttps_epi32(0xffff, _mm512_add_ps(v, _mm512_castsi512_ps(half)));
  };
  store_words<true>(to, from, n, past, [=](__m512i bits) {
    const Pair<T> x = load_pair<T>(reinterpret_cast<const T*>(&bits));
    __m512i words;
    if constexpr (kAlternating<T>) {
      words = _mm512_mask_blend_epi16(0xaaaaaaaa, integers(x.x), _mm512_maskz_slli_epi32(0xffff, integers(x.y), 16));
    } else {
      const __m256i low = _mm512_maskz_cvtepi32_epi16(0xffff, integers(x.x));
      words = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low),
                                       _mm512_maskz_cvtepi32_epi16(0xffff, integers(x.y)), 1);
    }
    return kShifted ? _mm512_add_epi16(words, zero) : words;
  });
}
#endif

// inside: no product is NaN, infinite or above the largest code.  past: lines that are whole may go past the caches.
template <class T>
inline void codes_times(QuantCode kind, void* to, const T* from, int64_t n, float factor, bool inside,
                        [[maybe_unused]] bool past = false) {
  switch (kind) {
    case QuantCode::kE4M3:
#if defined(__AVX512BW__)
      if constexpr (__is_same(T, bf16))
        if (factor > 0.0f && factor <= __FLT_MAX__)
          return inside ? multiply_to_e4m3<true>(to, from, n, factor) : multiply_to_e4m3<false>(to, from, n, factor);
#endif
      return inside ? multiply_to_codes<InsideE4M3>(to, from, n, factor) : multiply_to_codes<e4m3>(to, from, n, factor);
    case QuantCode::kE5M2:
      return multiply_to_codes<e5m2>(to, from, n, factor);
    case QuantCode::kInt8Truncated:
      return multiply_to_codes<TruncatedInt8>(to, from, n, factor);
    default:
#if defined(__AVX512BW__)
      if constexpr (sizeof(T) == 2)
        if (inside) return int8_codes<false, false>(static_cast<i8*>(to), from, n, past, factor, 0);
#endif
      return inside ? multiply_to_codes<InsideInt8>(to, from, n, factor)
                    : multiply_to_codes<int8_t>(to, from, n, factor);
  }
}

// Codes of numbers times a factor, plus a zero point.
template <class T>
[[gnu::noinline]] void shifted_codes(void* to, const T* from, int64_t n, float factor, int32_t zero_point) {
  auto* const codes = static_cast<int8_t*>(to);
  if (zero_point > 1 << 21 || zero_point < -(1 << 21)) {
    for (int64_t i = 0; i < n; ++i) {
      const float v = to_float(from[i]) * factor, size = v < 0.0f ? -v : v;
      const float rounded = size < 0x1p23f ? (size + 0x1p23f) - 0x1p23f : size < 0x1p31f ? size : 0x1p31f;
      const double sum = (v < 0.0f ? -1.0 : 1.0) * (v == v ? static_cast<double>(rounded) : 0.0);
      const double saturated = sum > 2147483647.0 ? 2147483647.0 : sum, shifted = saturated + zero_point;
      codes[i] = static_cast<int8_t>(shifted > 127.0 ? 127.0 : shifted < -128.0 ? -128.0 : shifted);
    }
    return;
  }
  // What would be saturated then is so before.
  const float least = static_cast<float>(-128 - zero_point), most = static_cast<float>(127 - zero_point);
  each_pair(0, n, [=](int64_t i, int64_t count) {
    const Pair<T> v = load_pair<T>(from + i, count) * factor;
    const Pair<T> shifted = each(v, [=](Floats x) {
      const Floats within = greater(lesser(x == x ? x : Floats{}, splat(most)), splat(least));
      return __builtin_bit_cast(Floats,
                                __builtin_bit_cast(Words, within + 12582912.0f) + static_cast<uint32_t>(zero_point));
    });
    store_quantised(reinterpret_cast<LowByte*>(codes + i), shifted, count);
  });
}

// Of numbers of type T, by their bits.
template <class T>
class LargestOf : LargestFloat<T> {
 public:
  void take(const T* from, int64_t count) { LargestFloat<T>::take(load_pair<T>(from, count)); }
  using LargestFloat<T>::lanes;
  static Floats values(Words lanes) { return __builtin_bit_cast(Floats, lanes); }
};
#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class LargestOf<T> {
 public:
  void take(const T* from, int64_t count) {
    const __mmask32 inside = count >= kPair ? ~__mmask32{} : _bzhi_u32(~uint32_t{}, static_cast<uint32_t>(count));
    const PairHalfwords magnitudes = __builtin_bit_cast(PairHalfwords, _mm512_maskz_loadu_epi16(inside, from)) & 0x7fff;
    most_ = magnitudes > most_ ? magnitudes : most_;
  }
  Words lanes() const {
    const Words both = __builtin_bit_cast(Words, most_), low = both & 0xffffu, high = both >> 16;
    return low > high ? low : high;
  }
  static Floats values(Words lanes) { return Largest<T>::values(lanes); }

 private:
  PairHalfwords most_ = {};
};

// Larger 16-bit numbers of two vectors.
inline Words larger_halfwords(Words a, Words b) {
  const auto x = __builtin_bit_cast(PairHalfwords, a), y = __builtin_bit_cast(PairHalfwords, b);
  return __builtin_bit_cast(Words, x > y ? x : y);
}

// Of kWidth rows of n elements of 16 bits, a multiple of kPair: lane i is that of row i.
template <class T>
[[gnu::always_inline]] inline Words largest_of_rows(const T* from, int64_t n) {
  Words v[kWidth];
#pragma GCC unroll 16
  for (int64_t g = 0; g < kWidth; ++g, from += n) {
    Words largest = load_raw<Words>(from) & 0x7fff7fffu;
    for (int64_t i = kPair; i < n; i += kPair)
      largest = larger_halfwords(largest, load_raw<Words>(from + i) & 0x7fff7fffu);
    v[g] = largest;
  }
  const Words both = reduce_each(v, larger_halfwords), low = both & 0xffffu, high = both >> 16;
  return low > high ? low : high;
}

// The same of rows of 16 elements, two of which fill a vector.
inline constexpr int64_t kShortRow = 16;
template <class T>
inline Words largest_of_short_rows(const T* from) {
  constexpr int kVectors = kWidth / 2;
  Words v[kVectors], order;
  for (int i = 0; i < kVectors; ++i) v[i] = load_raw<Words>(from + i * kPair) & 0x7fff7fffu;
  const Words both = reduce_each<kVectors / 2>(v, larger_halfwords);  // all first rows of vectors, then all second ones
  for (uint32_t i = 0; i < kWidth; ++i) order[i] = i / 2 + i % 2 * kVectors;
  const Words halves = shuffle(both, both, order), low = halves & 0xffffu, high = halves >> 16;
  return low > high ? low : high;
}
#endif

// Whether all are less, and none is NaN.
inline bool all_below(Floats v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, splat(limit), _CMP_LT_OQ) == 0xffff;
#else
  bool all = true;
  for (int64_t i = 0; i < kWidth; ++i) all &= v[i] < limit;
  return all;
#endif
}

// The largest magnitudes of up to kWidth rows of n numbers, one behind the other: `most` without NaN, `inside` NaN where there is
// one.  Those behind the last row are 0.
template <class T>
void find_largest(float* most, float* inside, const T* from, int64_t n, int64_t rows) {
  const auto find = [=] {
#if defined(__AVX512BW__)
    if constexpr (sizeof(T) == 2) {
      if (n == kShortRow && rows == kWidth) return largest_of_short_rows(from);
      if (n == kPair && rows == kWidth) return largest_of_rows(from, kPair);
      if (n == 4 * kPair && rows == kWidth) return largest_of_rows(from, 4 * kPair);
      if (n % kPair == 0 && rows == kWidth) return largest_of_rows(from, n);
    }
#endif
    Words lanes[kWidth];  // all of which at once are not cleared: that is a kilobyte
    for (int64_t g = 0; g < rows; ++g) {
      LargestOf<T> largest;
      for (int64_t i = 0; i < n; i += kPair) largest.take(from + g * n + i, n - i);
      lanes[g] = largest.lanes();
    }
    for (int64_t g = rows; g < kWidth; ++g) lanes[g] = Words{};
    return largest_lanes(lanes);
  };
  const Floats all = LargestOf<T>::values(find());
  store(inside, all);
  store(most, all);
  if (all_below(all, INFINITY)) return;
  for (int64_t g = 0; g < rows; ++g)
    if (inside[g] != inside[g]) most[g] = largest_number(from + g * n, n);
}

}  // namespace pykv::PYKV_ISA
