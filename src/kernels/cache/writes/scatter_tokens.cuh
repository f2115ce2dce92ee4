// Tokens into a cache whose elements lie side by side as they do in the token (flash layouts, packed keys).
//
// A thread takes one vector (16 bytes where the addresses allow it) of up to kTokens tokens, so that everything
// about its place in a head is computed once and its loads are all in flight together, with those of the slots.  2^lanes_log2
// threads lie along the token; the others of a warp take the next tokens.  Waits for the kernel before.
#pragma once

#include "cache/writes/reshape_and_cache.cuh"
#include "cuda/dependent.cuh"

namespace pykv {

template <class Mover, int kTokens>
__device__ __forceinline__ void scatter_tokens(const SlotMap& map, const SidePlan& side, const Scale* scale,
                                               uint32_t block) {
  const uint32_t lane = threadIdx.x & ((1u << side.lanes_log2) - 1), row = threadIdx.x >> side.lanes_log2;
  const uint32_t rows = blockDim.x >> side.lanes_log2;
  uint32_t piece;
  const uint32_t group = side.pieces(block, piece);
  const uint32_t vector = (piece << side.lanes_log2) + lane;

  uint32_t in_head, in_chunk;
  const uint32_t head = side.vectors_per_head(vector, in_head);
  const uint32_t chunk = side.vectors_per_chunk(in_head, in_chunk);
  const char* from = side.data + head * side.data_head + in_head * side.data_vector;
  char* to = side.cache + head * side.head + chunk * side.chunk + in_chunk * sizeof(typename Mover::Result);

  const int64_t first = int64_t{group} * (rows * side.tokens) + row;
  const int64_t group_end = first - row + rows * side.tokens,
                end = group_end < map.num_tokens ? group_end : map.num_tokens;
  from += first * side.data_token;
  have_ready(from);
  have_ready(to);
  constexpr bool kCopies = Mover::kStoredFormat == KvFormat::kSame;
  if (comes_early() && (kCopies || gridDim.x <= kFewBlocks) && vector < side.num_vectors) {
    map.prefetch_slot(first);
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
      if (first + i * rows < end) prefetch(from + i * rows * side.data_token);
  }
  begin_dependent();
  if (vector >= side.num_vectors) return;

  typename Mover::Loaded loaded[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i)
    if (first + i * rows < end) loaded[i] = load_vec<typename Mover::Loaded>(from + i * rows * side.data_token);
  const Slots<kTokens> slots = map.load<kTokens>(first, rows, end);

  const Quotient quotient(scale ? (*scale)[head] : 1.0f);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    int64_t page;
    uint32_t offset;
    if (map.locate(map.slot(slots, i), page, offset)) {
      char* place = to + page * side.block + offset * side.token;
      store_vec(place, Mover::convert(loaded[i], quotient));
    }
  }
}

}  // namespace pykv
