// Rows in blocks of one weight each: what makes of a product one with several weights.
//
// It is what moe_align_block_size gives.  Row p of out is that of row p / top_k of x.
#pragma once

#include <cstdint>

#include "core/launch.h"

namespace pykv {

struct TileMap {
  const int32_t* rows;  // [num_blocks * block_size]: of out; those outside [0, num_rows): none.  null: there is no map
  const int32_t* weights;  // [num_blocks]: of each block; one outside [0, num_weights): its rows are not written
  const int32_t* taken;    // places of `rows` that count; null: all
  int64_t num_blocks, block_size;
  int64_t top_k;
  int64_t num_weights, weight_stride, bias_stride;  // bytes, elements
  const float* factors;  // what rows of out are multiplied by at last, row p with [p / top_k, p % top_k]; null: 1
  int64_t factors_token_stride, factors_stride;  // elements

  // The weight of the block that has place `at`, -1: there is nothing to do.
  PYKV_HOST_DEVICE __attribute__((always_inline)) int32_t weight_at(int64_t at, int64_t block) const {
    const int32_t weight = weights[block];
    return weight < num_weights && (!taken || at < *taken) ? weight : -1;
  }
  PYKV_HOST_DEVICE __attribute__((always_inline)) float factor_of(int64_t row) const {
    return factors ? factors[row / top_k * factors_token_stride + row % top_k * factors_stride] : 1.0f;
  }
};

}  // namespace pykv
