// Tiles of rows of a weight times pairs of one expert, for blocks that walk over them.
#pragma once

#include "gemm/tile_map.cuh"

namespace pykv {

struct TileGrid {
  uint32_t row_tiles, most_pair_tiles;
  uint32_t band;  // tiles of pairs that pass over the weight together: they and it stay in the L2
};

// What lies in the map may come from a kernel that ended while this one was there already, so the L1 is left out.
template <uint32_t kPairs>
struct ExpertTiles {
  const TileMap& map;
  const TileRows& rows;
  const TileGrid& grid;
  const int64_t num_rows;  // of out
  uint32_t taken;          // tiles of pairs that there are
  uint32_t count, step;    // of all; this block's are first(), first() + step ...

  __device__ ExpertTiles(const TileMap& m, const TileRows& r, const TileGrid& g, int64_t n)
      : map(m), rows(r), grid(g), num_rows(n) {
    const uint32_t blocks = gridDim.x;
    taken = grid.most_pair_tiles;
    if (map.taken) taken = min(taken, (static_cast<uint32_t>(max(__ldcg(map.taken), 0)) + kPairs - 1) / kPairs);
    // Where there may be one for each block, it does not wait for how many there are before it asks for its expert.
    count = (grid.most_pair_tiles * grid.row_tiles > blocks ? taken : grid.most_pair_tiles) * grid.row_tiles;
    // All blocks that have some have equally many, or one less.
    const uint32_t rounds = (count + blocks - 1) / blocks;
    step = rounds == 0 ? 1 : (count + rounds - 1) / rounds;
    if (first() >= step) count = 0;
  }

  __device__ static uint32_t first() { return blockIdx.x; }

  __device__ void place(uint32_t index, uint32_t& row_tile, uint32_t& pair_tile) const {
    const uint32_t together = grid.band * grid.row_tiles, band = index / together, within = index - band * together;
    const uint32_t height = min(grid.band, count / grid.row_tiles - band * grid.band);
    row_tile = within / height;
    pair_tile = band * grid.band + within - row_tile * height;
  }

  // Negative: there is nothing to do.
  __device__ int32_t expert(uint32_t pair_tile) const {
    const int32_t e = __ldcg(map.weights + rows.tiles_of_block.quotient(static_cast<int>(pair_tile)));
    return e < map.num_weights && pair_tile < taken ? e : -1;
  }

  // The row of out of a pair of this block, -1: there is none.
  __device__ int32_t row(uint32_t pair_tile, int pair) const {
    const int32_t row = __ldcg(map.rows + int64_t{pair_tile} * kPairs + pair);
    return row < num_rows ? row : -1;
  }
};

}  // namespace pykv
