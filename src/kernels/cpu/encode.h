// Elements divided by a scale and rounded to a one-byte float, in bulk; or what another rule makes of them, see below.
//
// For a given scale the code is a staircase over the bits of a 16-bit T: of sixteen (E5M2: eight) equal parts of a binade
// none has more than one step, and the binades of normal codes are alike.  In a part, (bits + d) >> kDrop is the code's
// magnitude for a d that puts the step where the shift carries.  AVX-512 looks up the d of 32 elements in two tables,
// one for normal codes and one for what is below: no division, no conversion, no product.
#pragma once

#include <algorithm>

#include "cpu/quantise.h"

namespace pykv::PYKV_ISA {

// A rule makes codes of numbers, one or a vector at once: of ever larger ones never smaller codes, and twice the code's
// number of twice the number.  This one is that of the caches.
template <class Code>
struct Divided {
  static constexpr uint8_t kNan = __is_same(Code, e4m3) ? 0x7f : 0x7e;
  static constexpr bool kNanHasSign = true;
  float scale;

  Code code(float v) const { return from_float<Code>(v / scale); }
  void store(Code* to, Floats v, int64_t count) const { PYKV_ISA::store(to, v / scale, count); }
};

template <class T, class Code, class Rule>
void store_by_rule(const Rule& rule, Code* to, const T* from, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) rule.store(to + i, load(from + i), kWidth);
  if (i < n) rule.store(to + i, load(from + i, n - i), n - i);
}

template <class T, class Code, class Rule = Divided<Code>>
class Encoder {
 public:
  static constexpr bool kStreams = false;  // past the caches, if asked to

  // For that many elements in all: few are not worth tables.
  Encoder(float scale, int64_t) : rule_{scale} {}

  void operator()(Code* to, const T* from, int64_t n, bool = false) const { store_by_rule(rule_, to, from, n); }
  static constexpr bool tables() { return false; }

 private:
  Rule rule_;
};

#if defined(__AVX512BW__)
// What a pack made of two vectors, of which eight bytes are either's in turn, with all of the first before the second's.
inline __m512i one_after_other(__m512i packed) {
  return _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

// n bytes of the words that words_of(bits) makes of 32 elements: those of unsigned ones, or of signed ones, which saturate.
template <bool kSigned, class Code, class T, class WordsOf>
inline void store_words(Code* to, const T* from, int64_t n, bool past, WordsOf words_of) {
  const auto words_at = [&](const T* at) { return words_of(_mm512_loadu_si512(at)); };
  int64_t i = 0;
  for (; i + 2 * kPair <= n; i += 2 * kPair) {
    const __m512i first = words_at(from + i), second = words_at(from + i + kPair);
    const __m512i both = kSigned ? _mm512_packs_epi16(first, second) : _mm512_packus_epi16(first, second);
    store_raw(to + i, one_after_other(both), past);
  }
  for (; i < n; i += kPair) {
    T some[kPair];
    const T* at = from + i;
    if (n - i < kPair) load_first(some, at, n - i), at = some;
    const __m512i words = words_at(at);
    store_codes(
        to + i,
        kSigned ? _mm512_maskz_cvtsepi16_epi8(~__mmask32{}, words) : _mm512_maskz_cvtepi16_epi8(~__mmask32{}, words),
        n - i, past);
  }
}
#endif

// int8: numbers are brought into range before they are divided, so that none is infinite then, nor its quotient too large.
template <class T>
class Encoder<T, i8, Divided<i8>> {
 public:
#if defined(__AVX512BW__)
  static constexpr bool kStreams = sizeof(T) == 2;
#else
  static constexpr bool kStreams = false;
#endif

  Encoder(float scale, int64_t) : scale_(scale) {}

  void operator()(i8* to, const T* from, int64_t n, bool past = false) const {
    if (!(scale_ > 0x1p-40f && scale_ < 0x1p40f)) return store_by_rule(Divided<i8>{scale_}, to, from, n);
#if defined(__AVX512BW__)
    if constexpr (sizeof(T) == 2) {
      if (scale_ > kLeastByBits && scale_ < kMostByBits) return by_bits(to, from, n, past);
    }
#endif
    const float least = -128.4f * scale_, most = 127.4f * scale_;
    each_pair(0, n, [=, by = Divisor(scale_, most)](int64_t i, int64_t count) {
      const Pair<T> inside = each(load_pair<T>(from + i, count), [=](Floats v) {
        return greater(lesser(v == v ? v : Floats{}, splat(most)), splat(least));
      });
      store_quantised(reinterpret_cast<InsideInt8*>(to) + i, inside / by, count, past);
    });
  }

 private:
#if defined(__AVX512BW__)
  static constexpr bool kBf16 = __is_same(T, bf16);
  static constexpr float kLeastByBits = 0x1p-38f, kMostByBits = kBf16 ? 0x1p40f : 500.0f;

  // Magnitudes are brought into range by their bits, those of both signs at once: to 129 scales, or to a T above them whose
  // quotient fits into 16 bits all the same, for the last step saturates.
  void by_bits(i8* to, const T* from, int64_t n, bool past) const {
    const float wanted = 129.0f * scale_;
    T most = from_float<T>(wanted);
    if (to_float(most) < wanted) ++most.bits;
    const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(most.bits));
    const __m512 scale = splat(scale_), inverse = splat(1.0f / scale_);
    const auto quotient = [=](__m512i v) {  // see cpu/divisor.h; the sign of zero does not count here
      const __m512 x = _mm512_castsi512_ps(v), near = _mm512_mul_ps(x, inverse);
      return _mm512_maskz_cvtps_epi32(0xffff, _mm512_fmadd_ps(_mm512_fnmadd_ps(near, scale, x), inverse, near));
    };
    store_words<true>(to, from, n, past, [=](__m512i bits) {
      constexpr int16_t kInfinity = kBf16 ? 0x7f80 : 0x7c00;
      const __m512i sign = _mm512_set1_epi16(-0x8000), magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
      const __mmask32 number = _mm512_cmple_epu16_mask(magnitude, _mm512_set1_epi16(kInfinity));
      const __m512i inside = _mm512_maskz_min_epu16(number, magnitude, limit);  // NaN becomes 0
      const __m512i v = _mm512_ternarylogic_epi32(bits, inside, sign, 0xe4);    // c ? a : b
      if constexpr (kBf16) {
        const __m512i even = quotient(_mm512_maskz_slli_epi32(0xffff, v, 16));
        const __m512i odd = quotient(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        return _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_maskz_slli_epi32(0xffff, odd, 16));
      } else {
        const auto words = [&](__m256i half) {
          const __m512 x = _mm512_maskz_cvtph_ps(0xffff, half);
          return _mm512_maskz_cvtepi32_epi16(0xffff, quotient(_mm512_castps_si512(x)));
        };
        __m256i halves[2];
        __builtin_memcpy(halves, &v, sizeof v);
        for (__m256i& half : halves) half = words(half);
        return load_raw<__m512i>(halves);
      }
    });
  }
#endif

  float scale_;
};

#if defined(__AVX512BW__)
// The first from low to high that is so, as all after it are; `high` where there are none.
template <class IsSo>
inline uint32_t first_where(uint32_t low, uint32_t high, IsSo is_so) {
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (is_so(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A rule's codes of 16-bit T: where they change.
template <class T, class Code, class Rule>
class Staircase {
 public:
  static constexpr int kMantissa = __is_same(T, bf16) ? 7 : 10;  // of T
  static constexpr int kCodeMantissa = __is_same(Code, e4m3) ? 3 : 2;
  static constexpr int kDrop = kMantissa - kCodeMantissa;
  static constexpr uint32_t kBinade = 1u << kMantissa;
  static constexpr uint32_t kInfinity = ((1u << (15 - kMantissa)) - 1u) << kMantissa;
  static constexpr uint8_t kLargestCode = __is_same(Code, e4m3) ? 0x7e : 0x7b;

  explicit Staircase(Rule rule) : rule_(rule) {}

  uint8_t code_of(uint32_t bits) const { return rule_.code(to_float(T{static_cast<uint16_t>(bits)})).bits; }

  // The least bits from low to high with a code of at least so much; `high` where there are none.
  uint32_t least_with(int code, uint32_t low = 0, uint32_t high = kInfinity) const {
    return first_where(low, high, [&](uint32_t bits) { return code_of(bits) >= code; });
  }

  // The first binade of T that has only quotients above the least normal code (which smaller ones too are rounded to), and where
  // quotients become the largest one.
  uint32_t normal() const { return (least_with((1 << kCodeMantissa) + 1) + kBinade - 1u) & ~(kBinade - 1u); }
  uint32_t top() const { return least_with(kLargestCode); }

 private:
  Rule rule_;
};

inline constexpr int64_t kWorthTables = 1 << 16;  // elements

template <class T, class Code, class Rule>
  requires(sizeof(T) == 2 && (__is_same(Code, e4m3) || __is_same(Code, e5m2)))
class Encoder<T, Code, Rule> {
 public:
  static constexpr bool kStreams = true;

  Encoder(float scale, int64_t elements) : scale_(scale), rule_{scale}, tables_(elements >= kWorthTables && build()) {}

  void operator()(Code* to, const T* from, int64_t n, bool past = false) const {
    if (!tables_) return store_by_rule(rule_, to, from, n);
    convert(to, from, n, 0, past);
  }

  // Of elements divided by the scale times 2^power, if tables(), which leave room for it.
  void scaled(Code* to, const T* from, int64_t n, int power, bool past = false) const {
    convert(to, from, n, power, past);
  }
  // Of `count` times kPair elements, at most kWidth times, each of which is divided by 2^(exponents[i] - 127).
  void scaled_pairs(Code* to, const T* from, int64_t count, const uint32_t* exponents, int64_t ahead, bool past) const {
    // Bits of quotients less those of 2^-47, below which no code is normal: magnitudes' bits less one number, saturated at 0.
    constexpr int kBinades = 80, kLess = kBinades << kMantissa;
    static_assert(__is_same(T, bf16));
    uint32_t base[kWidth];  // twice in a word
    _mm512_storeu_si512(
        base, __builtin_bit_cast(__m512i, ((load_raw<Words>(exponents) - (127u - kBinades)) << kMantissa) * 0x10001u));
    const auto all = [](int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
    const __m512i normal = _mm512_add_epi16(table_.normal, all(kLess)), least = all(least_normal() - kLess),
                  largest = _mm512_set1_epi8(Steps::kLargestCode);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      const __m512i first = _mm512_loadu_si512(from + i * kPair), second = _mm512_loadu_si512(from + (i + 1) * kPair);
      const auto quotient = [&](__m512i bits, int64_t k) {
        return _mm512_subs_epu16(magnitude_of(bits), _mm512_set1_epi32(static_cast<int>(base[k])));
      };
      const __m512i x = quotient(first, i), y = quotient(second, i + 1);
      prefetch_bytes(from + i * kPair + ahead, 2 * kPair * sizeof(T));
      if (_mm512_cmplt_epu16_mask(_mm512_maskz_min_epu16(~__mmask32{}, x, y), least) == 0) {
        const __m512i codes = _mm512_packus_epi16(normal_codes(x, x, normal), normal_codes(y, y, normal));
        store_raw(to + i * kPair, with_signs(_mm512_maskz_min_epu8(~__mmask64{}, codes, largest), first, second), past);
      } else {
        convert_rare(to + i * kPair, from + i * kPair, kPair, static_cast<int>(exponents[i]) - 127, past);
        convert_rare(to + (i + 1) * kPair, from + (i + 1) * kPair, kPair, static_cast<int>(exponents[i + 1]) - 127,
                     past);
      }
    }
    if (i < count) convert_rare(to + i * kPair, from + i * kPair, kPair, static_cast<int>(exponents[i]) - 127, past);
  }
  bool tables() const { return tables_; }

  // What 64 finite elements below the largest code need where all codes are normal: false where one is not.
  static bool store_normal(Code* to, const T* from, __m512i least, __m512i normal, bool past) {
    const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + kPair);
    const __m512i x = magnitude_of(first), y = magnitude_of(second);
    if (_mm512_cmplt_epu16_mask(_mm512_maskz_min_epu16(~__mmask32{}, x, y), least) != 0) return false;
    store_raw(to, with_signs(normal_codes(x, x, normal), normal_codes(y, y, normal), first, second), past);
    return true;
  }
  // From where on they are normal, in the bits of T, and their d.
  int least_normal() const { return _mm512_cvtsi512_si32(table_.least_normal) & 0xffff; }
  __m512i normal() const { return table_.normal; }

 private:
  using Steps = Staircase<T, Code, Rule>;
  static constexpr int kMantissa = Steps::kMantissa, kDrop = Steps::kDrop;
  static constexpr int kNormalPart = kMantissa - 5, kSmallPart = kMantissa - 3;  // log2 of the bits' values in a part

  // Bounds in every lane; the d of normal codes and of those below.
  struct Tables {
    __m512i top, bottom, least_normal, normal, small[2];
  };

  static __m512i magnitude_of(__m512i bits) { return _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)); }
  // Of a magnitude and a sum from which the code follows by its d, whose binade does not matter.
  static __m512i normal_codes(__m512i magnitude, __m512i sum, __m512i normal) {
    const __m512i d = _mm512_maskz_permutexvar_epi16(~__mmask32{}, _mm512_srli_epi16(magnitude, kNormalPart), normal);
    return _mm512_srli_epi16(_mm512_add_epi16(sum, d), kDrop);
  }
  // Bytes of 64 codes, with the signs of their elements.
  static __m512i with_signs(__m512i codes, __m512i first, __m512i second) {
    const __m512i signs = _mm512_packs_epi16(first, second);
    return one_after_other(_mm512_ternarylogic_epi32(codes, signs, _mm512_set1_epi8(-128), 0xf8));  // a | b & c
  }
  static __m512i with_signs(__m512i x, __m512i y, __m512i first, __m512i second) {
    return with_signs(_mm512_packus_epi16(x, y), first, second);
  }

  // Out of line, so that what it needs is not made for all others.
  [[gnu::noinline, gnu::cold]] void convert_rare(Code* to, const T* from, int64_t n, int power, bool past) const {
    convert(to, from, n, power, past);
  }
  // Where 64 elements have normal codes alone, one table does; else each is looked up in all.
  void convert(Code* to, const T* from, int64_t n, int power, bool past) const {
    const Tables tables = table_;  // which no store can change
    const int shift = power * (1 << kMantissa);
    const auto all = [](int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
    const auto at = [&](__m512i bound) {
      const int shifted = _mm512_cvtsi512_si32(bound) & 0xffff;
      return std::clamp(shifted + shift, 0, static_cast<int>(Steps::kInfinity));
    };
    const __m512i least = all(at(tables.least_normal)), top = all(at(tables.top));
    const __m512i normal = _mm512_sub_epi16(tables.normal, all(shift));
    const __m512i less = all(shift > 0 ? shift : 0), more = all(shift < 0 ? -shift : 0);
    const auto words_of = [&](__m512i bits) {
      const __m512i magnitude = magnitude_of(bits);
      return look_up(tables, bits, magnitude, _mm512_adds_epu16(_mm512_subs_epu16(magnitude, less), more));
    };
    int64_t i = 0;
    for (; i + 2 * kPair <= n; i += 2 * kPair) {
      const __m512i first = _mm512_loadu_si512(from + i), second = _mm512_loadu_si512(from + i + kPair);
      const __m512i x = magnitude_of(first), y = magnitude_of(second);
      const __mmask32 large = _mm512_cmpge_epu16_mask(_mm512_maskz_min_epu16(~__mmask32{}, x, y), least);
      const __mmask32 normal_ones =
          _mm512_mask_cmplt_epu16_mask(large, _mm512_maskz_max_epu16(~__mmask32{}, x, y), all(Steps::kInfinity));
      if (normal_ones == ~__mmask32{}) {
        const __m512i v = _mm512_maskz_min_epu16(~__mmask32{}, x, top),
                      w = _mm512_maskz_min_epu16(~__mmask32{}, y, top);
        store_raw(to + i, with_signs(normal_codes(v, v, normal), normal_codes(w, w, normal), first, second), past);
      } else {
        store_raw(to + i, one_after_other(_mm512_packus_epi16(words_of(first), words_of(second))), past);
      }
    }
    if (i < n) store_words<false>(to + i, from + i, n - i, past, words_of);
  }

  // The d of the part of 2^size values from `begin`; false if it has more than one step (T's subnormals may).
  static bool find_shift(const Steps& steps, uint32_t begin, int size, uint16_t* d) {
    const int code = steps.code_of(begin);
    const uint32_t end = begin + (1u << size);
    if (steps.code_of(end - 1) > code + 1) return false;
    *d = static_cast<uint16_t>(((code + 1u) << kDrop) - steps.least_with(code + 1, begin, end));
    return true;
  }

  bool build() {
    if (!(scale_ > 0x1p-100f && scale_ < 0x1p100f)) return false;
    const Steps steps(rule_);
    const uint32_t normal = steps.normal(), top = steps.top();
    if (normal + Steps::kBinade > top || top >= Steps::kInfinity) return false;
    // of the 64 parts below, the first has zeros alone
    constexpr uint32_t kParts = 64u << kSmallPart;
    const uint32_t bottom = normal > kParts ? normal - kParts : 0u;
    if (bottom > 0 && steps.code_of(bottom) != 0) return false;
    uint16_t d[64] = {};
    for (uint32_t i = 0; i < 32; ++i)
      if (!find_shift(steps, normal + (i << kNormalPart), kNormalPart, d + i)) return false;
    table_.normal = _mm512_loadu_si512(d);
    for (uint32_t begin = bottom; begin < normal; begin += 1u << kSmallPart)
      if (!find_shift(steps, begin, kSmallPart, d + (begin >> kSmallPart & 63u))) return false;
    table_.small[0] = _mm512_loadu_si512(d);
    table_.small[1] = _mm512_loadu_si512(d + 32);
    table_.top = _mm512_set1_epi16(static_cast<int16_t>(top));
    table_.bottom = _mm512_set1_epi16(static_cast<int16_t>(bottom));
    table_.least_normal = _mm512_set1_epi16(static_cast<int16_t>(normal));
    return true;
  }

  // The codes of `quotient`, with the signs of `bits`; NaN is known by its magnitude.
  static __m512i look_up(const Tables& tables, __m512i bits, __m512i magnitude, __m512i quotient) {
    const __m512i within = _mm512_max_epu16(_mm512_min_epu16(quotient, tables.top), tables.bottom);
    const __m512i small =
        _mm512_permutex2var_epi16(tables.small[0], _mm512_srli_epi16(within, kSmallPart), tables.small[1]);
    const __m512i d = _mm512_mask_permutexvar_epi16(small, _mm512_cmpge_epu16_mask(within, tables.least_normal),
                                                    _mm512_srli_epi16(within, kNormalPart), tables.normal);
    const __m512i sum = _mm512_add_epi16(within, d);
    const __mmask32 number = _mm512_cmple_epu16_mask(magnitude, _mm512_set1_epi16(Steps::kInfinity));
    __m512i code, sign;
    if constexpr (Rule::kNanHasSign) {
      code = _mm512_mask_srli_epi16(_mm512_set1_epi16(Rule::kNan), number, sum, kDrop);
      sign = _mm512_srli_epi16(bits, 8);
    } else {  // NaN is the largest: within bounds it is
      static_assert(Rule::kNan == Steps::kLargestCode);
      code = _mm512_srli_epi16(sum, kDrop);
      sign = _mm512_maskz_srli_epi16(number, bits, 8);
    }
    // code | sign & 0x80: 0xf8 is a | b & c
    return _mm512_ternarylogic_epi32(code, sign, _mm512_set1_epi16(0x80), 0xf8);
  }

  float scale_;
  Rule rule_;
  Tables table_;
  bool tables_;
};
#endif

}  // namespace pykv::PYKV_ISA
