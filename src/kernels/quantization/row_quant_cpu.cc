// Twin of row_quant.cu: a row is one thread's.  While its codes are made, a later row is asked for, some lines with every step.
#include <algorithm>
#include <cmath>

#include "cpu/codes.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/stream_copy.h"
#include "cpu/tile_encoder.h"
#include "quantization/row_quant.h"

namespace pykv::PYKV_ISA {
namespace {

// The least and the largest number; 0 where there is none.
template <class T>
[[gnu::noinline]] void find_extremes_of_floats(float& low, float& high, const T* from, int64_t n) {
  struct Extremes {
    Pair<T> low, high;
  };
  // What is no number, or behind the end, counts for neither.
  const auto next = [=](Extremes so_far, int64_t i, int64_t count) {
    Pair<T> v = load_pair<T>(from + i, count);
    if (count < kPair) {
      const float first = to_float(from[0]);
      float values[kPair];
      for (int64_t k = 0; k < kPair; ++k) values[k] = k < count ? to_float(from[i + k]) : first;
      v = load_pair<T>(static_cast<const float*>(values));
    }
    return Extremes{min(v, so_far.low), max(v, so_far.high)};  // NaN gives the other
  };
  const Extremes all = fold_pairs(0, n, Extremes{INFINITY, -INFINITY}, next);
  const auto less = [](auto a, auto b) { return a < b ? a : b; };
  low = reduce(min(all.low.x, all.low.y), less);
  high = max(all.high);
  if (!(low <= high)) low = high = 0.0f;
}

#if defined(__AVX512BW__)
// The least of 32 unsigned numbers.
inline uint16_t least_halfword(__m512i v) {
  __m256i halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  const __m256i half = _mm256_min_epu16(halves[0], halves[1]);
  const __m128i eight = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return static_cast<uint16_t>(_mm_extract_epi16(_mm_minpos_epu16(eight), 0));
}
#endif

// The same; true if all are finite, as far as that is known.
template <class T>
bool find_extremes(float& low, float& high, const T* from, int64_t n) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    // Bits of negative numbers grow as these fall, above those of positive ones: the largest bits are those of the least number,
    // if one is negative, and as signed integers those of the largest one, if one is not; else the least bits.
    const __m512i first = _mm512_set1_epi16(static_cast<int16_t>(from[0].bits));
    __m512i least = first, most = first, most_signed = first;
    const auto take = [&](__m512i bits) {
      least = _mm512_maskz_min_epu16(~__mmask32{}, least, bits);
      most = _mm512_maskz_max_epu16(~__mmask32{}, most, bits);
      most_signed = _mm512_maskz_max_epi16(~__mmask32{}, most_signed, bits);
    };
    int64_t i = 0;
    for (; i + kPair <= n; i += kPair) take(_mm512_loadu_si512(from + i));
    if (i < n) take(_mm512_mask_loadu_epi16(first, _bzhi_u32(~uint32_t{}, static_cast<uint32_t>(n - i)), from + i));
    const uint16_t a = least_halfword(least), b = ~least_halfword(_mm512_xor_si512(most, _mm512_set1_epi16(-1))),
                   c = 0x7fff ^ least_halfword(_mm512_xor_si512(most_signed, _mm512_set1_epi16(0x7fff)));
    const uint16_t lowest = b >= 0x8000 ? b : a, highest = c < 0x8000 ? c : a;
    constexpr uint16_t kInfinity = kAlternating<T> ? 0x7f80 : 0x7c00;
    if ((lowest & 0x7fff) < kInfinity && (highest & 0x7fff) < kInfinity) {
      low = to_float(T{lowest}), high = to_float(T{highest});
      return true;
    }
  }
#endif
  find_extremes_of_floats(low, high, from, n);
  return false;
}

// Codes of a row for write_converted, by what is known of it.
template <class T>
struct OfAnyRow {
  static constexpr bool kStreams = false;
  const RowQuantArgs& args;
  RowScale scale;
  bool inside;  // no product is infinite, NaN or too large

  void operator()(uint8_t* to, const T* from, int64_t n, bool) const {
    switch (args.rule) {
      case RowRule::kDivide:
        if (args.codes == QuantCode::kE4M3) return divide_to_codes<e4m3>(to, from, n, Divisor(scale.scale));
        return divide_to_codes<e5m2>(to, from, n, Divisor(scale.scale));
      case RowRule::kInt8Away:
        return multiply_to_codes<AwayInt8>(to, from, n, scale.factor);
      case RowRule::kInt8Shifted:
        return shifted_codes(to, from, n, scale.factor, scale.zero_point);
      default:
        return codes_times(args.codes, to, from, n, scale.factor, inside);
    }
  }
};
template <class T>
struct ByTables {
  static constexpr bool kStreams = true;
  const TileEncoder<T, ByLargest, 448>& tiles;
  float largest;

  void operator()(uint8_t* to, const T* from, int64_t n, bool past) const {
    tiles.divide(reinterpret_cast<e4m3*>(to), from, n, largest, past);
  }
};
#if defined(__AVX512BW__)
// Of finite 16-bit numbers and a finite factor: products are at most 127, or where there is a zero point 2^20, but their sums with it
// are codes or next to them.
template <bool kAway, bool kShifted, class T>
struct Int8OfRow {
  static constexpr bool kStreams = true;
  RowScale scale;

  void operator()(uint8_t* to, const T* from, int64_t n, bool past) const {
    int8_codes<kAway, kShifted>(reinterpret_cast<i8*>(to), from, n, past, scale.factor, scale.zero_point);
  }
};
#endif

}  // namespace

void row_quant_cpu(const RowQuantArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 16384;
  const float bound = args.bounded ? float{args.bound} : INFINITY;
  const bool by_tables = args.rule == RowRule::kDivide && args.codes == QuantCode::kE4M3;
  const int64_t rows = args.valid.of(args.rows);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const TileEncoder<T, ByLargest, 448> tiles(by_tables ? rows * args.width : 0);
    const bool streamed = rows * args.width > kWorthStreaming;
    parallel_for(rows, std::max<int64_t>(1, kElementsWorthAThread / args.width), [&](int64_t begin, int64_t end) {
      LineWriter writer(streamed);
      for (int64_t row = begin; row < end; ++row) {
        const auto row_at = [&](int64_t r) {
          return static_cast<const T*>(args.input) + args.input_rows.offset(std::min(r, rows - 1));
        };
        const T* const from = row_at(row);
        float low = 0.0f, high[kWidth], inside[kWidth] = {};
        bool finite;
        if (args.rule == RowRule::kInt8Shifted) {
          finite = find_extremes(low, high[0], from, args.width);
        } else {
          find_largest(high, inside, from, args.width, 1);
          finite = inside[0] < INFINITY;
        }
        const RowScale scale = args.scale_of(low, high[0], bound);
        args.scales[row * args.scale_stride] = scale.scale;
        if (args.zero_points) args.zero_points[row * args.zero_stride] = scale.zero_point;
        const auto write = [&](const auto& codes) {
          write_converted(writer, codes, static_cast<uint8_t*>(args.out) + args.out_rows.offset(row), from, args.width,
                          row_at(row + 1 + rows_ahead<T>(args.width)) - from);
        };
        finite = finite && scale.factor < INFINITY;
        if (by_tables && finite && scale.scale == high[0] / 448.0f && tiles.divides(high[0])) {
          write(ByTables<T>{tiles, high[0]});
          continue;
        }
#if defined(__AVX512BW__)
        if constexpr (sizeof(T) == 2) {
          if (finite && args.rule == RowRule::kInt8) {
            write(Int8OfRow<false, false, T>{scale});
            continue;
          }
          if (finite && args.rule == RowRule::kInt8Away) {
            write(Int8OfRow<true, false, T>{scale});
            continue;
          }
          if (finite && args.rule == RowRule::kInt8Shifted) {
            write(Int8OfRow<false, true, T>{scale});
            continue;
          }
        }
#endif
        write(OfAnyRow<T>{args, scale, finite && args.rule == RowRule::kInt8});
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
