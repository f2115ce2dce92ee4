// A block of the indexer's cache: first all values, then all scales.  With D values and G scales a token:
//
//   value(o, d)  byte o * D + d                        E4M3
//   scale(o, g)  byte BS * D + (o * G + g) * 4         of values g * D / G and on: float32, or four equal exponents
//
// The shape [NB, BS, D + 4 * G] of such a cache is its size alone: a token is no row of it.
#pragma once

#include <cstdint>

#include "core/check.h"

namespace pykv {

struct IndexerBlock {
  static constexpr float kLargest = 448.0f, kLeastMagnitude = 1e-4f;  // scale = max(amax, kLeastMagnitude) / kLargest

  int64_t block_size, values, groups;

  constexpr int64_t scales_at() const { return block_size * values; }
  constexpr int64_t scale_bytes() const { return 4 * groups; }  // of a token
};

// Whether `cache` [NB, BS, bytes of a token] holds such blocks, each in one piece.
inline void check_indexer_cache(Tensor& cache, const IndexerBlock& block) {
  cache.dtype({DType::kUInt8, DType::kInt8, DType::kFloat8E4M3});
  if (cache.size(0) == 0 || cache.size(1) == 0) return;  // without a slot; [NB, BS, 0] has some, and no memory
  if (cache.size(2) < block.values + block.scale_bytes())
    cache.fail(PYKV_VALUE_ERROR, "must have at least %lld bytes for a token, %lld values and %lld scales, got shape %s",
               static_cast<long long>(block.values + block.scale_bytes()), static_cast<long long>(block.values),
               static_cast<long long>(block.groups), cache.shape_string().c_str());
  if ((cache.size(2) > 1 && cache.stride(2) != 1) || (cache.size(1) > 1 && cache.stride(1) != cache.size(2)))
    cache.fail(PYKV_VALUE_ERROR, "a block must be contiguous, got strides %lld and %lld for shape %s",
               static_cast<long long>(cache.stride(1)), static_cast<long long>(cache.stride(2)),
               cache.shape_string().c_str());
}

}  // namespace pykv
