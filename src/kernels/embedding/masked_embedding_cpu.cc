// A row is copied, or goes through a buffer of floats, piece by piece.
#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/gguf_decode_cpu.h"
#include "embedding/masked_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 256;  // a multiple of kWidth, and whole blocks of every format of GGUF

void load_floats(float* to, DType dtype, const void* row, int64_t first, int64_t count) {
  if (dtype == DType::kUInt8) dtype = DType::kFloat8E4M3;
  dispatch<float, f16, bf16, i8, e4m3, e5m2>(dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(row) + first;
    for (int64_t i = 0; i < count; i += kWidth) store(to + i, load(from + i, count - i));
  });
}

// The row of a table of rows `stride` elements apart.
const void* row_at(const void* table, DType dtype, int64_t row, int64_t stride) {
  return static_cast<const char*>(table) + row * stride * static_cast<int64_t>(size_of(dtype));
}

void scale_floats(float* x, const MaskedEmbeddingArgs& args, int64_t row, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count;) {
    const int64_t group = (first + i) / args.group_size;
    const int64_t end = std::min(count, (group + 1) * args.group_size - first);
    const float own = args.weight_scale ? args.weight_scale[row * args.scale_row + group * args.scale_group] : 1.0f;
    for (; i < end; ++i) x[i] = x[i] * own * args.scale;
  }
}

void copy(void* to, const void* from, int64_t bytes, bool streamed) {
  if (streamed)
    stream_copy(static_cast<char*>(to), static_cast<const char*>(from), bytes);
  else
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

void embed(const MaskedEmbeddingArgs& args, Decode decode, int64_t token, int64_t row, int64_t position) {
  for (int64_t first = 0; first < args.hidden_size; first += kPiece) {
    const int64_t count = std::min(kPiece, args.hidden_size - first);
    alignas(64) float x[kPiece] = {}, more[kPiece];
    if (row >= 0) {
      const void* from = row_at(args.weight, args.weight_dtype, row, args.weight_stride);
      if (decode) {
        decode(static_cast<const uint8_t*>(from) + first / args.block.elements * args.block.bytes, count, x);
      } else {
        load_floats(x, args.weight_dtype, from, first, count);
      }
      scale_floats(x, args, row, first, count);
    }
    if (position >= 0) {
      const void* from = row_at(args.position_weight, args.position_dtype, position, args.position_stride);
      load_floats(more, args.position_dtype, from, first, count);
      for (int64_t i = 0; i < count; ++i) x[i] += more[i];
    }
    dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
      T* to = static_cast<T*>(args.out) + args.out_rows.offset(token) + first;
      for (int64_t i = 0; i < count; i += kWidth) store(to + i, load(x + i), count - i);
    });
  }
}

}  // namespace

void masked_embedding_cpu(const MaskedEmbeddingArgs& args, const Launch& launch) {
  constexpr int64_t kElementsWorthAThread = 16384;
  const int64_t item = static_cast<int64_t>(size_of(args.dtype));
  const int64_t bytes = args.hidden_size * item;
  const bool streamed = args.copies && args.num_tokens * bytes > kWorthStreaming;
  const Decode decode = args.block.elements ? decoder_of(args.block_type) : nullptr;
  parallel_for(args.num_tokens, kElementsWorthAThread / args.hidden_size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = args.ids[token], row = args.row_of(id);
      if (!args.is_token(id)) launch.reporter("masked_embedding: ids")(id, args.vocab_size);
      if (args.copies) {
        char* to = static_cast<char*>(args.out) + args.out_rows.offset(token) * item;
        if (row < 0)
          std::memset(to, 0, static_cast<size_t>(bytes));
        else
          copy(to, row_at(args.weight, args.dtype, row, args.weight_stride), bytes, streamed);
        continue;
      }
      int64_t position = args.positions.data ? args.positions[token] : -1;
      if (args.positions.data && (position < 0 || position >= args.num_positions)) {
        launch.reporter("masked_embedding: positions")(position, args.num_positions);
        position = -1;
      }
      embed(args, decode, token, row, position);
    }
    if (streamed) finish_streaming();
  });
}

}  // namespace pykv::PYKV_ISA
