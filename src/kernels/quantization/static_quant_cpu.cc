// Twin of static_quant.cu: pieces of rows.  One scale goes by tables and is bound by memory; scales of blocks have tables of their
// normal codes, made once for all rows of a block.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/codes.h"
#include "cpu/encode.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "quantization/static_quant.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements of a row

// body(writer, row, first column, count) for pieces of all rows, on several threads, which have a body each.
template <class Body>
void each_piece(const StaticQuantArgs& args, bool streamed, const Body& given) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece, grain = std::max<int64_t>(1, 4 * kPiece / args.width);
  parallel_for(args.rows * pieces, grain, [&](int64_t begin, int64_t end) {
    LineWriter writer(streamed);
    Body body = given;
    for (int64_t k = begin; k < end; ++k) {
      const int64_t first = k % pieces * kPiece;
      body(writer, k / pieces, first, std::min(kPiece, args.width - first));
    }
  });
}
template <class Body>
void each_piece(const StaticQuantArgs& args, const Body& body) {
  each_piece(args, false, [&](LineWriter&, int64_t row, int64_t first, int64_t n) { body(row, first, n); });
}

template <class T>
const T* input_at(const StaticQuantArgs& args, int64_t row, int64_t column) {
  return static_cast<const T*>(args.input) + args.input_rows.offset(row) + column;
}
uint8_t* output_at(const StaticQuantArgs& args, int64_t row, int64_t column) {
  return static_cast<uint8_t*>(args.out) + args.out_rows.offset(row) + column;
}

template <class T>
float largest_of_all(const StaticQuantArgs& args) {
  std::atomic<float> all{0.0f};
  each_piece(args, [&](int64_t row, int64_t first, int64_t n) {
    constexpr int64_t kAhead = kBytesAhead / sizeof(T);
    const T* const from = input_at<T>(args, row, first);
    LargestOf<T> largest;
    for (int64_t k = 0; k < n; k += kPair) {
      prefetch_bytes<1>(from + k + kAhead, kPair * sizeof(T));
      largest.take(from + k, n - k);
    }
    const Floats lanes = LargestOf<T>::values(largest.lanes());
    const float most = all_below(lanes, INFINITY) ? max(lanes) : largest_number(from, n);
    for (float before = all.load(); before < most && !all.compare_exchange_weak(before, most);) {
    }
  });
  return all.load();
}

// What `encode` makes of each piece, past the caches where that is much.
template <class T, class Code, class Encode>
void write(const StaticQuantArgs& args, const Encode& encode) {
  each_piece(args, args.rows * args.width > kWorthStreaming,
             [&](LineWriter& writer, int64_t row, int64_t first, int64_t n) {
               write_converted(writer, encode, reinterpret_cast<Code*>(output_at(args, row, first)),
                               input_at<T>(args, row, first), n, kBytesAhead / static_cast<int64_t>(sizeof(T)));
             });
}

// One scale.
template <class T>
void run_single(const StaticQuantArgs& args, float scale) {
  const int64_t elements = args.rows * args.width;
  const float factor = args.from_largest ? factor_of(scale) : 1.0f / scale;
  if (args.divides) return write<T, i8>(args, Encoder<T, i8, Divided<i8>>(scale, elements));
  if (args.shifted) {
    const int32_t zero_point = args.zero_point ? *args.zero_point : args.zero;
    return each_piece(args, [&](int64_t row, int64_t first, int64_t n) {
      shifted_codes(output_at(args, row, first), input_at<T>(args, row, first), n, factor, zero_point);
    });
  }
  if (args.codes == QuantCode::kE4M3 && factor == 1.0f / scale)
    return write<T, e4m3>(args, Encoder<T, e4m3, TimesInverse>(scale, elements));
  each_piece(args, [&](int64_t row, int64_t first, int64_t n) {
    codes_times(args.codes, output_at(args, row, first), input_at<T>(args, row, first), n, factor, false);
  });
}

template <class T, class Code>
[[gnu::noinline]] void multiply_each(void* to, const T* from, const float* factors, int64_t n) {
  each_pair(0, n, [=](int64_t i, int64_t count) {
    store_quantised(static_cast<Code*>(to) + i, load_pair<T>(from + i, count) * load_pair<T>(factors + i, count),
                    count);
  });
}

// What is known of a row of scales, for all rows that have it.
template <class T>
class RowOfScales {
 public:
  RowOfScales(const StaticQuantArgs& args) : args_(args) {}

  void take(int64_t row) {
    if (row == row_) return;
    row_ = row;
    const int64_t groups = (args_.width + args_.group_columns - 1) / args_.group_columns;
    factors_.clear();
    for (int64_t g = 0; g < groups; ++g)
      factors_.push_back(1.0f / args_.scales[row * args_.scale_row + g * args_.scale_column]);
#if defined(__AVX512BW__)
    tables_.clear();
    if (kTables && args_.codes == QuantCode::kE4M3 && args_.group_rows >= kWorthTables)
      for (float factor : factors_) tables_.emplace_back(factor);
#endif
  }
  float factor(int64_t group) const { return factors_[group]; }

  void encode(uint8_t* to, const T* from, int64_t n, int64_t group) const {
#if defined(__AVX512BW__)
    if constexpr (kTables) {
      const float factor = factors_[group];
      if (args_.codes == QuantCode::kE4M3 && factor > 0.0f && factor <= __FLT_MAX__) {
        int64_t i = 0;
        for (; !tables_.empty() && i + 2 * kPair <= n; i += 2 * kPair)
          if (!tables_[group](to + i, from + i)) multiply_to_e4m3<false>(to + i, from + i, 2 * kPair, factor);
        return multiply_to_e4m3<false>(to + i, from + i, n - i, factor);
      }
    }
#endif
    codes_times(args_.codes, to, from, n, factors_[group], false);
  }

 private:
  const StaticQuantArgs& args_;
  int64_t row_ = -1;
  std::vector<float> factors_;
#if defined(__AVX512BW__)
  static constexpr bool kTables = std::is_same_v<T, bf16>;
  static constexpr int64_t kWorthTables = 8;  // rows
  std::vector<NormalE4M3> tables_;
#endif
};

// A scale for each rectangle: of wide ones by stretches of a row, else by a row of factors.
template <class T>
void run_groups(const StaticQuantArgs& args) {
  constexpr int64_t kWide = 64;
  const bool streamed = args.rows * args.width > kWorthStreaming;
  each_piece(args, streamed,
             [&args, scales = RowOfScales<T>(args)](LineWriter& writer, int64_t row, int64_t first, int64_t n) mutable {
               scales.take(row / args.group_rows);
               const T* from = input_at<T>(args, row, first);
               alignas(64) uint8_t to[kPiece];
               float factors[kPiece];
               int64_t group = first / args.group_columns, end = (group + 1) * args.group_columns - first;
               for (int64_t c = 0; c < n; ++group, end += args.group_columns) {
                 const int64_t last = std::min(n, end);
                 if (args.group_columns >= kWide) {
                   prefetch_bytes(from + c + 2 * kBytesAhead / static_cast<int64_t>(sizeof(T)),
                                  (last - c) * static_cast<int64_t>(sizeof(T)));
                   scales.encode(to + c, from + c, last - c, group);
                   c = last;
                 }
                 for (; c < last; ++c) factors[c] = scales.factor(group);
               }
               if (args.group_columns < kWide) {
                 if (args.codes == QuantCode::kE4M3) {
                   multiply_each<T, e4m3>(to, from, factors, n);
                 } else {
                   multiply_each<T, e5m2>(to, from, factors, n);
                 }
               }
               writer.put(output_at(args, row, first), to, n);
             });
}

}  // namespace

void static_quant_cpu(const StaticQuantArgs& given, const Launch&) {
  StaticQuantArgs args = given;
  args.rows = given.valid.of(given.rows);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (args.from_largest) {
      *args.scale_out = largest_of_all<T>(args) / largest_code(args.codes);
      run_single<T>(args, *args.scale_out);
    } else if (args.scales) {
      run_groups<T>(args);
    } else {
      run_single<T>(args, args.number);
    }
  });
}

}  // namespace pykv::PYKV_ISA
