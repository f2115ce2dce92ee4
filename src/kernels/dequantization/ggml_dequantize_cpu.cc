// Twin of ggml_dequantize.cu: tiles of a row, shared out among threads.  A tile is decoded to floats, whatever the output, and
// these are rounded to it.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/ggml_dequantize.h"
#include "dequantization/gguf_decode_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kTile = 1024;        // elements: whole blocks of every format
constexpr int64_t kTilesPerTask = 16;  // fewer are not worth another thread

template <class T>
void dequantise(const GgmlDequantizeArgs& args, Decode decode, pykv::gguf::BlockSize size) {
  const DecodeTo<T> quick = quick_decoder_of<T>(args.type);
  const int64_t tiles = (args.row_elements + kTile - 1) / kTile, grain = std::max<int64_t>(1, kTilesPerTask / tiles);
  const bool streamed = args.num_rows * args.row_elements * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
  parallel_for(args.num_rows * tiles, tiles == 1 ? grain : kTilesPerTask, [&](int64_t begin, int64_t end) {
    LineWriter out(streamed);
    alignas(64) float values[kTile];
    alignas(64) T rounded[kTile];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / tiles, first = i % tiles * kTile, n = std::min(kTile, args.row_elements - first);
      const uint8_t* blocks = static_cast<const uint8_t*>(args.blocks) + args.block_rows.offset(row);
      T* to = static_cast<T*>(args.output) + args.output_rows.offset(row) + first;
      blocks += first / size.elements * size.bytes;
      if (quick) {
        quick(blocks, n, rounded);
      } else {
        decode(blocks, n, values);
        for (int64_t e = 0; e < n; e += kWidth) store(rounded + e, load(values + e));
      }
      out.put(to, rounded, n * static_cast<int64_t>(sizeof(T)));
    }
  });
}

}  // namespace

void ggml_dequantize_cpu(const GgmlDequantizeArgs& args, const Launch&) {
  const Decode decode = decoder_of(args.type);
  dispatch<float, f16, bf16>(args.dtype,
                             [&]<class T>() { dequantise<T>(args, decode, pykv::gguf::block_size(args.type)); });
}

}  // namespace pykv::PYKV_ISA
