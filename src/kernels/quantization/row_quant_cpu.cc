// Twin of row_quant.cu: a row is one thread's.  While its codes are made, the next row is asked for.
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
void find_extremes(float& low, float& high, const T* from, int64_t n) {
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

template <class T>
void encode(const RowQuantArgs& args, uint8_t* to, const T* from, int64_t n, const RowScale& scale, bool numbers) {
  switch (args.rule) {
    case RowRule::kDivide:
      if (args.codes == QuantCode::kE4M3) return divide_to_codes<e4m3>(to, from, n, Divisor(scale.scale));
      return divide_to_codes<e5m2>(to, from, n, Divisor(scale.scale));
    case RowRule::kInt8Away:
      return multiply_to_codes<AwayInt8>(to, from, n, scale.factor);
    case RowRule::kInt8Shifted:
      return shifted_codes(to, from, n, scale.factor, scale.zero_point);
    default:
      return codes_times(args.codes, to, from, n, scale.factor,
                         numbers && args.rule == RowRule::kInt8 && scale.factor < INFINITY);
  }
}

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
        const T* from = static_cast<const T*>(args.input) + args.input_rows.offset(row);
        float low = 0.0f, high[kWidth], inside[kWidth] = {};
        if (args.rule == RowRule::kInt8Shifted) {
          find_extremes(low, high[0], from, args.width);
        } else {
          find_largest(high, inside, from, args.width, 1);
        }
        const RowScale scale = args.scale_of(low, high[0], bound);
        args.scales[row * args.scale_stride] = scale.scale;
        if (args.zero_points) args.zero_points[row * args.zero_stride] = scale.zero_point;
        uint8_t* const to = static_cast<uint8_t*>(args.out) + args.out_rows.offset(row);
        const bool finite = inside[0] < INFINITY;
        if (by_tables && finite && scale.scale == high[0] / 448.0f &&
            tiles.divide(reinterpret_cast<e4m3*>(to), from, args.width, high[0]))
          continue;
        const T* const next =
            static_cast<const T*>(args.input) + args.input_rows.offset(row + 1 < rows ? row + 1 : row);
        writer.fill(to, args.width, [&](uint8_t* at, int64_t first, int64_t count) {
          if (streamed) prefetch_bytes(next + first, count * static_cast<int64_t>(sizeof(T)));
          encode(args, at, from + first, count, scale, finite);
        });
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
