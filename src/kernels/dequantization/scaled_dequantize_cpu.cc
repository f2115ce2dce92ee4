// Twin of scaled_dequantize.cu: tiles of some rows and columns, of which the scales are spread once for each group of rows.
#include <algorithm>

#include "cpu/nvfp4_decode.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "dequantization/scaled_dequantize.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kRows = 32, kColumns = 256;

float scale_of(const ScaledDequantizeArgs& args, int64_t at) {
  switch (args.scale_is) {
    case GroupScale::kFloat:
      return static_cast<const float*>(args.scales)[at];
    case GroupScale::kE4M3:
      return to_float(e4m3{static_cast<const uint8_t*>(args.scales)[at]}) / args.number;
    case GroupScale::kE8M0: {
      const uint32_t exponent = static_cast<const uint8_t*>(args.scales)[at];
      return __builtin_bit_cast(float, exponent == 255 ? 0x7fc00000u : exponent == 0 ? 0x00400000u : exponent << 23);
    }
    default:
      return args.number;
  }
}

// scales[c] of the columns from `first` on.
void spread_scales(const ScaledDequantizeArgs& args, int64_t matrix, int64_t row, int64_t first, int64_t columns,
                   float* scales) {
  int64_t group = first / args.group_columns, end = (group + 1) * args.group_columns - first;
  for (int64_t c = 0; c < columns; ++group, end += args.group_columns) {
    const float scale = scale_of(args, args.scale_at(matrix, row / args.group_rows, group));
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

template <class T, class Code>
void dequantise(const ScaledDequantizeArgs& args) {
  const int64_t across = (args.columns + kColumns - 1) / kColumns, down = (args.rows + kRows - 1) / kRows;
  parallel_for(args.matrices * across * down, 4, [&](int64_t begin, int64_t end) {
    alignas(64) float scales[kColumns] = {};
    alignas(64) uint8_t codes[kColumns] = {};
    alignas(64) T rounded[kColumns];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / across / down, first_row = i / across % down * kRows, first = i % across * kColumns;
      const int64_t rows = std::min(kRows, args.rows - first_row), columns = std::min(kColumns, args.columns - first);
      for (int64_t row = first_row; row < first_row + rows; ++row) {
        const bool same_group =
            args.scale_is == GroupScale::kNumber || row / args.group_rows == (row - 1) / args.group_rows;
        if (row == first_row || !same_group) spread_scales(args, matrix, row, first, columns, scales);
        const uint8_t* from = args.codes + matrix * args.code_matrix + row * args.code_row;
        const uint8_t* bytes = codes;
        if constexpr (std::is_same_v<Code, e2m1>) {
          for (int64_t c = 0; c < columns; c += 16) unpack_codes(codes + c, from + (first + c) / 2);
        } else if (columns == kColumns) {
          bytes = from + first;
        } else {
          __builtin_memcpy(codes, from + first, static_cast<size_t>(columns));
        }
        T* to = static_cast<T*>(args.output) + matrix * args.output_matrix + row * args.output_row + first;
        T* target = columns == kColumns ? to : rounded;
        for (int64_t c = 0; c < columns; c += kWidth) store(target + c, load_codes<Code>(bytes + c) * load(scales + c));
        if (columns != kColumns) __builtin_memcpy(to, rounded, static_cast<size_t>(columns) * sizeof(T));
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
