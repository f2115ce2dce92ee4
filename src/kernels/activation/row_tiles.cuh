// Rows cut into tiles of vectors: a block takes block.y rows, threads side by side along a row, each with kVectors vectors
// of kSize elements.
#pragma once

#include "core/args.h"
#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/launch.h"
#include "cuda/vec.cuh"

namespace pykv {

struct RowTiles {
  dim3 block;
  unsigned blocks;
  Divider tiles;  // of one row
};

inline constexpr int kTileThreads = 256;  // at most

inline RowTiles row_tiles(int64_t wanted, int64_t num_rows, int threads) {
  dim3 block(1);
  while (block.x < wanted && static_cast<int>(block.x) < threads) block.x *= 2;
  block.y = threads / block.x;
  const int64_t tiles = (wanted + block.x - 1) / block.x, row_groups = (num_rows + block.y - 1) / block.y;
  if (tiles * row_groups > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "input: too large, more than 2^31 - 1 tiles");
  return {block, static_cast<unsigned>(tiles * row_groups), Divider(tiles)};
}

// The vectors of a thread: vector k starts at element first + k * step of its row, if has(k).
template <int kSize, int kVectors>
struct TilePart {
  int64_t row, first, end;
  int step;

  __device__ TilePart(const Divider& tiles, int64_t num_rows, int64_t width) {
    uint32_t tile;
    row = int64_t{tiles(blockIdx.x, tile)} * blockDim.y + threadIdx.y;
    first = (int64_t{tile} * (blockDim.x * kVectors) + threadIdx.x) * kSize;
    end = row < num_rows ? width : 0;
    step = blockDim.x * kSize;
  }
  __device__ bool has(int k) const { return first + k * step < end; }
};

// start<kSize, kVectors>(tiles), with the widest vectors for which aligned(bytes), in blocks of at most so many threads.
template <class T, int kThreads = kTileThreads, class Aligned, class Start>
void tile_rows(Aligned aligned, int64_t width, int64_t num_rows, int device, Start start) {
  const auto sized = [&]<int kSize>() {
    const int64_t vectors = width / kSize;  // of a row
    // What does not fill the chip is spread over as much of it as possible.
    if (vectors * num_rows > int64_t{num_sms(device)} * 1024) {
      start.template operator()<kSize, 2>(row_tiles((vectors + 1) / 2, num_rows, kThreads));
    } else {
      start.template operator()<kSize, 1>(row_tiles(vectors, num_rows, kTileThreads / 2));
    }
  };
  if (aligned(kAccessBytes)) {
    sized.template operator()<kPackSize<T>>();
  } else if (aligned(2 * sizeof(T))) {
    sized.template operator()<2>();
  } else {
    sized.template operator()<1>();
  }
}

}  // namespace pykv
