// A map of tiles on the CPU: all rows of a weight at once.  Each is read once, for it may change meanwhile.
#pragma once

#include <vector>

#include "core/launch.h"
#include "gemm/tile_map.h"

namespace pykv::PYKV_ISA {

// Calls f(weight, rows, count) for each run of blocks of one weight.
template <class F>
void for_each_weight(const TileMap& map, int64_t num_rows, F&& f) {
  std::vector<int32_t> rows;
  int32_t weight = -1;
  const auto finish = [&] {
    if (!rows.empty()) f(weight, rows.data(), static_cast<int64_t>(rows.size()));
    rows.clear();
  };
  for (int64_t block = 0; block < map.num_blocks; ++block) {
    const int64_t at = block * map.block_size;
    const int32_t next = map.weight_at(at, block);
    if (next != weight) finish();
    weight = next;
    if (weight < 0) continue;
    for (int64_t i = at; i < at + map.block_size; ++i) {
      const int32_t row = map.rows[i];
      if (row >= 0 && row < num_rows) rows.push_back(row);
    }
  }
  finish();
}

}  // namespace pykv::PYKV_ISA
