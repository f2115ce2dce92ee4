// Twin of scaled_dequantize.cu: tiles of some rows and columns, of which the scales are spread once for each group of rows.  With
// AVX-512, results of 16 bits are looked up: of codes of four bits by the byte of their scale, of eight by a table for each scale of
// many codes, or, where scales are powers of two, by one table and a sum of exponents.
#include <algorithm>
#include <vector>

#include "cpu/nvfp4_decode.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/rounded_pairs_cpu.h"
#include "dequantization/scaled_dequantize.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kRows = 32, kColumns = 1024;

float scale_of(const ScaledDequantizeArgs& args, uint8_t byte) {
  if (args.scale_is == GroupScale::kE4M3) return to_float(e4m3{byte}) / args.number;
  return __builtin_bit_cast(float, byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : uint32_t{byte} << 23);
}
float scale_at(const ScaledDequantizeArgs& args, int64_t at) {
  if (args.scale_is == GroupScale::kNumber) return args.number;
  if (args.scale_is == GroupScale::kFloat) return static_cast<const float*>(args.scales)[at];
  return scale_of(args, static_cast<const uint8_t*>(args.scales)[at]);
}

// scales[c] of the columns from `first` on.
void spread_scales(const ScaledDequantizeArgs& args, int64_t matrix, int64_t row, int64_t first, int64_t columns,
                   float* scales) {
  int64_t group = first / args.group_columns, end = (group + 1) * args.group_columns - first;
  for (int64_t c = 0; c < columns; ++group, end += args.group_columns) {
    float scale = scale_at(args, args.scale_at(matrix, row / args.group_rows, group));
    if (scale != scale) scale = __builtin_nanf("");  // store_pair takes no other NaN
    for (const int64_t last = std::min(columns, end); c < last; ++c) scales[c] = scale;
  }
}

// Sixteen codes of four bits, as bytes.
inline void unpack_codes(uint8_t* to, const uint8_t* from) {
#if defined(__x86_64__)
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), low = _mm_set1_epi8(15);
  const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
  _mm_store_si128(reinterpret_cast<__m128i*>(to), codes);
#else
  for (int i = 0; i < 2; ++i) {
    uint32_t packed;
    __builtin_memcpy(&packed, from + 4 * i, 4);
    const uint64_t eight = unpack_nibbles(packed);
    __builtin_memcpy(to + 8 * i, &eight, 8);
  }
#endif
}

// Codes of four bits become bytes first.
template <class Code>
Floats load_codes(const uint8_t* codes) {
  return load(reinterpret_cast<const Code*>(codes));
}
struct e2m1 {};
template <>
Floats load_codes<e2m1>(const uint8_t* codes) {
  return load_e2m1(codes);
}

// Results that are looked up.
template <class T, class Code>
class Tables {
 public:
  explicit Tables(const ScaledDequantizeArgs&) {}
  // Of so many columns from `first` on; how many it did, of the first ones.
  int64_t operator()(T*, const uint8_t*, int64_t, int64_t, int64_t, int64_t) { return 0; }
};
#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class Tables<T, e2m1> {
 public:
  explicit Tables(const ScaledDequantizeArgs& args) : args_(args) {
    const bool bytes = args.scale_is == GroupScale::kE4M3 || args.scale_is == GroupScale::kE8M0;
    there_ = bytes && args.group_rows == 1 && (args.group_columns == 16 || args.group_columns == 32) &&
             args.matrices * args.rows * args.columns >= kWorthTables;
    alignas(16) uint8_t codes[kCodes];
    for (int i = 0; i < kCodes; ++i) codes[i] = static_cast<uint8_t>(i);
    for (int byte = 0; there_ && byte < 256; ++byte)
      store(values_[byte], load_codes<e2m1>(codes) * splat(scale_of(args, static_cast<uint8_t>(byte))));
  }
  int64_t operator()(T* to, const uint8_t* from, int64_t matrix, int64_t row, int64_t first, int64_t columns) {
    if (!there_) return 0;
    const auto* const scales = static_cast<const uint8_t*>(args_.scales);
    int64_t done = 0;
    for (int64_t group = first / args_.group_columns; done + args_.group_columns <= columns; ++group) {
      const T* const values = values_[scales[args_.scale_at(matrix, row, group)]];
      for (const int64_t end = done + args_.group_columns; done < end; done += kCodes, from += kCodes / 2) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
        // The lower half of a byte to the lowest four bits of a lane, its upper half to those of the next: no others count.
        const __m256i places = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
        const __m256i sixteen = _mm256_permutexvar_epi16(places, load_raw<__m256i>(values));
        __builtin_memcpy(to + done, &sixteen, sizeof sixteen);
      }
    }
    return done;
  }

 private:
  static constexpr int kCodes = 16;
  static constexpr int64_t kWorthTables = 1 << 16;

  const ScaledDequantizeArgs& args_;
  bool there_;
  alignas(64) T values_[256][kCodes];
};

// 128 magnitudes.
template <class T>
struct Magnitudes {
  __m512i values[4];

  template <class Code>
  static Magnitudes of(Code, float scale) {
    uint8_t codes[128];
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(i);
    T numbers[128];
    for (int i = 0; i < 128; i += kWidth) store(numbers + i, load_codes<Code>(codes + i) * splat(scale));
    Magnitudes all;
    __builtin_memcpy(&all, numbers, sizeof all);
    return all;
  }
  // By the lower seven bits.
  __m512i operator[](__m512i codes) const {
    const __m512i low = _mm512_permutex2var_epi16(values[0], codes, values[1]),
                  high = _mm512_permutex2var_epi16(values[2], codes, values[3]);
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(64)), low, high);
  }
};

template <class T, class Code>
  requires(sizeof(T) == 2 && sizeof(Code) == 1 && !std::is_same_v<Code, e2m1>)
class Tables<T, Code> {
 public:
  explicit Tables(const ScaledDequantizeArgs& args) : args_(args) {
    const bool many = args.matrices * args.rows * args.columns >= kWorthTables;
    powers_ = many && args.scale_is == GroupScale::kE8M0 && args.group_rows == 1 && args.group_columns == kCodes;
    numbers_ = many && (args.scale_is == GroupScale::kFloat || args.scale_is == GroupScale::kNumber) &&
               args.group_columns >= 2 * kCodes &&
               std::min(args.group_rows, kRows) * std::min(args.group_columns, kColumns) >= kWorthOne;
    if (powers_) tables_.push_back(Magnitudes<T>::of(Code{}, 1.0f));
  }
  int64_t operator()(T* to, const uint8_t* from, int64_t matrix, int64_t row, int64_t first, int64_t columns) {
    if (powers_) return by_powers(to, from, matrix, row, first, columns);
    if (!numbers_) return 0;
    const int64_t of_row = args_.scale_is == GroupScale::kNumber ? 0 : row / args_.group_rows;
    if (matrix != matrix_ || of_row != row_ || first != first_ || columns != columns_) {
      matrix_ = matrix, row_ = of_row, first_ = first, columns_ = columns;
      tables_.clear();
      for (int64_t group = first / args_.group_columns; group * args_.group_columns < first + columns; ++group)
        tables_.push_back(Magnitudes<T>::of(Code{}, scale_at(args_, args_.scale_at(matrix, of_row, group))));
    }
    int64_t end = (first / args_.group_columns + 1) * args_.group_columns - first, done = 0;
    for (const Magnitudes<T>& table : tables_) {
      for (; done + kCodes <= std::min(end, columns); done += kCodes) put(to + done, table, from + done);
      if (done < end) break;  // a group does not end with whole vectors
      end += args_.group_columns;
    }
    return done;
  }

 private:
  static constexpr int64_t kCodes = 32, kWorthTables = 1 << 16, kWorthOne = 1024;
  static constexpr bool kE4M3 = std::is_same_v<Code, e4m3>;

  static __m512i widened(const uint8_t* from) { return _mm512_cvtepu8_epi16(load_raw<__m256i>(from)); }
  static void put(T* to, __m512i magnitudes, __m512i codes) {
    const __m512i all =
        _mm512_ternarylogic_epi32(magnitudes, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16(-0x8000), 0x78);
    __builtin_memcpy(to, &all, sizeof all);
  }
  static void put(T* to, const Magnitudes<T>& table, const uint8_t* from) {
    const __m512i codes = widened(from);
    put(to, table[codes], codes);
  }
  // Products are normal numbers of T where the exponent is not too small or too large; 0, NaN and infinity have none.
  int64_t by_powers(T* to, const uint8_t* from, int64_t matrix, int64_t row, int64_t first, int64_t columns) const {
    constexpr int kLeast = kE4M3 ? -9 : -16, kMost = kE4M3 ? 8 : 15, kLast = kE4M3 ? 0x7e : 0x7b;
    constexpr bool kBf16 = std::is_same_v<T, bf16>;
    constexpr int kFraction = kBf16 ? 7 : 10, kLow = (kBf16 ? -126 : -14) - kLeast, kHigh = (kBf16 ? 127 : 15) - kMost;
    const auto* const scales = static_cast<const uint8_t*>(args_.scales);
    int64_t done = 0;
    for (int64_t group = first / kCodes; done + kCodes <= columns; ++group, done += kCodes) {
      const uint8_t byte = scales[args_.scale_at(matrix, row, group)];
      const int power = byte - 127;
      if (power < kLow || power > kHigh || (!kBf16 && kLeast < -14)) {
        const Floats scale = splat(scale_of(args_, byte));
        for (int64_t i = done; i < done + kCodes; i += kWidth) store(to + i, load_codes<Code>(from + i) * scale);
        continue;
      }
      const __m512i codes = widened(from + done), magnitudes = tables_[0][codes],
                    before = _mm512_add_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(-1));
      const __mmask32 numbers = _mm512_cmplt_epu16_mask(before, _mm512_set1_epi16(kLast));
      put(to + done,
          _mm512_mask_add_epi16(magnitudes, numbers, magnitudes,
                                _mm512_set1_epi16(static_cast<int16_t>(power * (1 << kFraction)))),
          codes);
    }
    return done;
  }

  const ScaledDequantizeArgs& args_;
  bool powers_, numbers_;
  std::vector<Magnitudes<T>> tables_;  // of the groups side by side in a tile
  int64_t matrix_ = -1, row_ = -1, first_ = -1, columns_ = -1;
};
#endif

// By arithmetic; columns are counted from that of the tile.
template <class T, class Code>
void multiply(T* to, const uint8_t* from, const float* scales, int64_t columns) {
  alignas(64) uint8_t codes[kWidth > 16 ? kWidth : 16] = {};
  constexpr int64_t kStep = sizeof codes;
  int64_t c = 0;
  if constexpr (!std::is_same_v<Code, e2m1>) {
    const auto product = [&](int64_t i) { return load_codes<Code>(from + i) * load(scales + i); };
    for (; c + 2 * kWidth <= columns; c += 2 * kWidth) store_pair(to + c, product(c), product(c + kWidth));
  }
  for (; c < columns; c += kStep) {
    const int64_t count = std::min(kStep, columns - c);
    const uint8_t* bytes = codes;
    if constexpr (std::is_same_v<Code, e2m1>) {
      unpack_codes(codes, from + c / 2);
    } else if (count == kStep) {
      bytes = from + c;
    } else {
      __builtin_memcpy(codes, from + c, static_cast<size_t>(count));
    }
    for (int64_t i = 0; i < count; i += kWidth) store(to + c + i, load_codes<Code>(bytes + i) * load(scales + c + i));
  }
}

template <class T, class Code>
void dequantise(const ScaledDequantizeArgs& args) {
  const int64_t across = (args.columns + kColumns - 1) / kColumns, down = (args.rows + kRows - 1) / kRows;
  const bool streamed = args.matrices * args.rows * args.columns * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
  const Tables<T, Code> made(args);
  parallel_for(args.matrices * across * down, 1, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    Tables<T, Code> tables = made;
    alignas(64) float scales[kColumns + 16] = {};
    alignas(64) T rounded[kColumns + 16];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / across / down, first_row = i / across % down * kRows, first = i % across * kColumns;
      const int64_t rows = std::min(kRows, args.rows - first_row), columns = std::min(kColumns, args.columns - first);
      int64_t known = -1;
      for (int64_t row = first_row; row < first_row + rows; ++row) {
        const int64_t at = std::is_same_v<Code, e2m1> ? first / 2 : first;
        const uint8_t* from = args.codes + matrix * args.code_matrix + row * args.code_row + at;
        T* to = static_cast<T*>(args.output) + matrix * args.output_matrix + row * args.output_row + first;
        if (streamed) prefetch_bytes(from + args.code_row, std::is_same_v<Code, e2m1> ? columns / 2 : columns);
        T* const target = streamed || columns != kColumns ? rounded : to;
        const int64_t done = tables(target, from, matrix, row, first, columns);
        if (done < columns) {
          const int64_t group = args.scale_is == GroupScale::kNumber ? 0 : row / args.group_rows;
          if (group != known) spread_scales(args, matrix, row, first, columns, scales);
          known = group;
          multiply<T, Code>(target + done, from + (std::is_same_v<Code, e2m1> ? done / 2 : done), scales + done,
                            columns - done);
        }
        if (target != to) out.put(to, target, columns * static_cast<int64_t>(sizeof(T)));
      }
    }
  });
}

}  // namespace

void scaled_dequantize_cpu(const ScaledDequantizeArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    switch (args.codes_are) {
      case SmallFloat::kE4M3:
        return dequantise<T, e4m3>(args);
      case SmallFloat::kE5M2:
        return dequantise<T, e5m2>(args);
      case SmallFloat::kE2M1:
        return dequantise<T, e2m1>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
