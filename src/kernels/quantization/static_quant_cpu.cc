// Twin of static_quant.cu: pieces of rows.  One scale goes by tables and is bound by memory; scales of blocks of bf16 take 26
// instructions for 32 elements, which a Zen 4 begins in 13 cycles: a copy takes 8.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/codes.h"
#include "cpu/encode.h"
#include "cpu/parallel.h"
#include "quantization/static_quant.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements of a row

// body(writer, row, first column, count) for pieces of all rows, on several threads.
template <class Body>
void each_piece(const StaticQuantArgs& args, bool streamed, const Body& body) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece, grain = std::max<int64_t>(1, 4 * kPiece / args.width);
  parallel_for(args.rows * pieces, grain, [&](int64_t begin, int64_t end) {
    LineWriter writer(streamed);
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
    float most[kWidth], inside[kWidth];
    find_largest(most, inside, input_at<T>(args, row, first), n, 1);
    for (float before = all.load(); before < most[0] && !all.compare_exchange_weak(before, most[0]);) {
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

// A scale for each rectangle: of wide ones by stretches of a row, else by a row of factors.
template <class T>
void run_groups(const StaticQuantArgs& args) {
  constexpr int64_t kWide = 64;
  const bool streamed = args.rows * args.width > kWorthStreaming;
  each_piece(args, streamed, [&](LineWriter& writer, int64_t row, int64_t first, int64_t n) {
    const float* scales = args.scales + row / args.group_rows * args.scale_row;
    const T* from = input_at<T>(args, row, first);
    uint8_t to[kPiece];
    float factors[kPiece];
    const auto encode = [&](uint8_t* codes, const T* x, int64_t count, float factor) {
#if defined(__AVX512BW__)
      if constexpr (std::is_same_v<T, bf16>)
        if (args.codes == QuantCode::kE4M3 && factor > 0.0f && factor <= __FLT_MAX__)
          return multiply_to_e4m3<false>(codes, x, count, factor);
#endif
      codes_times(args.codes, codes, x, count, factor, false);
    };
    int64_t group = first / args.group_columns, end = (group + 1) * args.group_columns - first;
    for (int64_t c = 0; c < n; ++group, end += args.group_columns) {
      const int64_t last = std::min(n, end);
      const float factor = 1.0f / scales[group * args.scale_column];
      if (args.group_columns >= kWide) {
        prefetch_bytes(from + c + kBytesAhead / static_cast<int64_t>(sizeof(T)),
                       (last - c) * static_cast<int64_t>(sizeof(T)));
        encode(to + c, from + c, last - c, factor);
        c = last;
      }
      for (; c < last; ++c) factors[c] = factor;
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

void static_quant_cpu(const StaticQuantArgs& args, const Launch&) {
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
