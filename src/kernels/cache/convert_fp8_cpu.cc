// Twin of convert_fp8.cu: rows of the innermost dimension, cut into pieces, shared out among threads.
#include <algorithm>

#include "cache/convert_fp8.h"
#include "cpu/decode.h"
#include "cpu/encode.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 4096;             // elements of a row at once
constexpr int64_t kElementsPerTask = 32768;  // fewer are not worth another thread

// of_row(LineWriter& out, To* to, const From* from, int64_t n) for elements side by side, of_scalar(float) for others.
template <class From, class To, class Row, class Scalar>
void convert_all(const ConvertFp8Args& args, Row&& of_row, Scalar&& of_scalar) {
  const int64_t *sizes = args.sizes, *in = args.input_strides, *out = args.output_strides;
  const int64_t pieces = (sizes[3] + kPiece - 1) / kPiece, elements = sizes[3] < kPiece ? sizes[3] : kPiece;
  const bool streamed = sizes[0] * sizes[1] * sizes[2] * sizes[3] * static_cast<int64_t>(sizeof(To)) > kWorthStreaming;
  parallel_for(
      sizes[0] * sizes[1] * sizes[2] * pieces, kElementsPerTask / elements + 1, [&](int64_t begin, int64_t end) {
        LineWriter stream(streamed);
        for (int64_t i = begin, some; i < end; i += some) {
          const int64_t row = i / pieces, piece = i % pieces, first = piece * kPiece;
          some = std::min(pieces - piece, end - i);
          const int64_t a = row / sizes[2] / sizes[1], b = row / sizes[2] % sizes[1], c = row % sizes[2];
          const From* from = static_cast<const From*>(args.input) + a * in[0] + b * in[1] + c * in[2] + first * in[3];
          To* to = static_cast<To*>(args.output) + a * out[0] + b * out[1] + c * out[2] + first * out[3];
          const int64_t n = std::min(sizes[3] - first, some * kPiece);
          if (in[3] == 1 && out[3] == 1) {
            of_row(stream, to, from, n);
          } else {
            for (int64_t e = 0; e < n; ++e) to[e * out[3]] = from_float<To>(of_scalar(to_float(from[e * in[3]])));
          }
        }
      });
}

template <class T, class Code>
void convert_pair(const ConvertFp8Args& args) {
  const float scale = args.scale[0];
  if (args.to_fp8) {
    const int64_t elements = args.sizes[0] * args.sizes[1] * args.sizes[2] * args.sizes[3];
    const Encoder<T, Code> encode(scale, elements);
    convert_all<T, Code>(
        args,
        [&](LineWriter& out, Code* to, const T* from, int64_t n) {
          write_converted(out, encode, to, from, n, rows_ahead<T>(1));
        },
        [scale](float x) { return x / scale; });
  } else {
    const Decoder<T, Code> decode(scale);
    convert_all<Code, T>(
        args,
        [&](LineWriter& out, T* to, const Code* from, int64_t n) {
          write_converted(out, decode, to, from, n, rows_ahead<Code>(1));
        },
        [scale](float x) { return x * scale; });
  }
}

}  // namespace

void convert_fp8_cpu(const ConvertFp8Args& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    return args.format == KvFormat::kE4M3 ? convert_pair<T, e4m3>(args) : convert_pair<T, e5m2>(args);
  });
}

}  // namespace pykv::PYKV_ISA
