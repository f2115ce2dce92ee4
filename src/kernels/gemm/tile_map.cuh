// A map of tiles on CUDA.
#pragma once

#include "cuda/divider.cuh"
#include "gemm/tile_map.h"

namespace pykv {

struct TileRows {
  Divider top_k, tiles_of_block;

  TileRows(const TileMap& map, int tile) : top_k(map.top_k), tiles_of_block(map.block_size / tile) {}

  // The row of out at a place, -1: there is none.
  __device__ static int64_t row_of_out(const TileMap& map, int64_t at, int64_t num_rows) {
    const int64_t row = map.rows ? map.rows[at] : at;
    return row < num_rows ? row : -1;
  }
  __device__ int64_t row_of_x(const TileMap& map, int64_t row) const {
    return map.rows ? top_k.quotient(static_cast<int>(row)) : row;
  }
};

}  // namespace pykv
