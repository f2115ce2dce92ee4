// Blocks of GGUF to floats.  Memory-bound: 150 MB for Q4_K 14336 x 4096 to half.
//
// Blocks have odd sizes and small fields, and a warp wants 16 bytes a thread: a thread block brings a tile of whole blocks to shared
// memory as it is, 16 bytes a thread at once, and each thread then decodes pieces of eight neighbours from there, in the order
// in which they are stored.  The format is the same for a whole call: one kernel has all of them, and a branch.
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/streaming.cuh"
#include "cuda/vec.cuh"
#include "dequantization/ggml_dequantize.h"
#include "dequantization/gguf_pieces.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kPiecesPerThread = 4;
constexpr int kTile = kThreads * kPiecesPerThread * 8;  // elements: whole blocks of every format
constexpr int kMaxBytes = kTile / 256 * 292;            // of a tile: Q8_K has most an element

struct Plan {
  gguf::Type type;
  Divider tiles_per_row;
  bool loads_aligned, stores_aligned, streamed;
};

// 16 bytes at once, or one where the array is not aligned.  A tile is a multiple of 16 bytes, but for the last one of a row.
__device__ void load_tile(uint8_t* to, const uint8_t* from, int bytes, bool aligned) {
  const int vectors = aligned ? bytes / 16 : 0;
  for (int i = threadIdx.x; i < vectors; i += kThreads)
    *reinterpret_cast<uint4*>(to + 16 * i) = *reinterpret_cast<const uint4*>(from + 16 * i);
  for (int i = 16 * vectors + threadIdx.x; i < bytes; i += kThreads) to[i] = from[i];
}

template <class T>
__device__ void store_piece(T* to, const gguf::Piece& piece, const Plan& plan) {
  constexpr int kSize = kPackSize<T>;
#pragma unroll
  for (int half = 0; half < 8 / kSize; ++half) {
    Vec<float, kSize> values;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int e = half * kSize + i;
      values[i] = piece.scale * (gguf::byte_value(piece.codes[e / 4], e % 4) - piece.zero) - piece.minimum;
    }
    const Pack<T> rounded = round_to<T>(values);
    if (plan.stores_aligned) {
      store_vec(to + half * kSize, rounded, plan.streamed);
    } else {
      for (int i = 0; i < kSize; ++i) to[half * kSize + i] = rounded[i];
    }
  }
}

template <gguf::Type kType, class T>
__device__ __forceinline__ void decode_tile(T* to, const uint8_t* blocks, int pieces, const Plan& plan) {
  constexpr gguf::BlockSize kSize = gguf::block_size(kType);
  constexpr int kPieces = kSize.elements / 8;
#pragma unroll
  for (int i = 0; i < kPiecesPerThread; ++i) {
    const int piece = threadIdx.x + i * kThreads;
    if (piece < pieces)
      store_piece(to + 8 * piece, gguf::decode_piece<kType>(blocks + piece / kPieces * kSize.bytes, piece % kPieces),
                  plan);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    ggml_dequantize_kernel(const __grid_constant__ GgmlDequantizeArgs args, const __grid_constant__ Plan plan) {
  __shared__ alignas(16) uint8_t tile[kMaxBytes];
  begin_dependent();
  uint32_t place;
  const int64_t row = plan.tiles_per_row(blockIdx.x, place);
  const int64_t first = static_cast<int64_t>(place) * kTile, left = args.row_elements - first;
  const int elements = left < kTile ? static_cast<int>(left) : kTile;
  const gguf::BlockSize size = gguf::block_size(plan.type);
  const uint8_t* from =
      static_cast<const uint8_t*>(args.blocks) + args.block_rows.offset(row) + first / size.elements * size.bytes;
  load_tile(tile, from, elements / size.elements * size.bytes, plan.loads_aligned);
  __syncthreads();
  T* to = static_cast<T*>(args.output) + args.output_rows.offset(row) + first;
  gguf::dispatch_type(plan.type, [&]<gguf::Type kType> { decode_tile<kType>(to, tile, elements / 8, plan); });
}

template <class T>
void launch_kernel(const GgmlDequantizeArgs& args, const Launch& launch) {
  const int64_t tiles = (args.row_elements + kTile - 1) / kTile;
  if (args.num_rows > (INT32_MAX / tiles))
    fail(PYKV_NOT_IMPLEMENTED, "W: 2^31 tiles of %d elements in one call are not supported", kTile);
  const int64_t size = sizeof(T);
  const Plan plan{args.type, Divider(tiles), rows_aligned(16, args.blocks, args.block_rows, 1),
                  rows_aligned(16, args.output, args.output_rows, size),
                  is_streamed(args.num_rows * args.row_elements * size)};
  launch_dependent(ggml_dequantize_kernel<T>, static_cast<uint32_t>(args.num_rows * tiles), kThreads, launch,
                   "ggml_dequantize", args, plan);
}

}  // namespace

void ggml_dequantize_cuda(const GgmlDequantizeArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T> { launch_kernel<T>(args, launch); });
}

}  // namespace pykv
