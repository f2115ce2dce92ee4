// Tokens into a cache in which neighbouring tokens of a page lie side by side, element by element (packed values).
//
// Writing such a cache token by token would touch a 32-byte sector for each element.  A block of threads therefore takes
// a tile of 32 tokens x 256 bytes of a head through shared memory and writes runs: as many tokens in consecutive slots of
// a page as fit into one aligned store of 16 bytes.  In a prefill nearly all tokens lie in full runs; a token alone is a
// run too, so any slot mapping comes out right.
#pragma once

#include "cache/reshape_and_cache.cuh"

namespace pykv {

inline constexpr int kTileTokens = 32;  // one for each lane of the warp that looks for runs
inline constexpr int kTileRowBytes = 256;
inline constexpr int kTilePitch = kTileRowBytes + 4;  // neither the rows written nor the columns read share banks

template <class Stored>
inline constexpr int kTileColumns = kTileRowBytes / sizeof(Stored);

struct Run {
  int64_t to;  // bytes from the cache's first element of this head
  int first, length;
};

struct alignas(16) TokenTile {
  char rows[kTileTokens * kTilePitch];
  Run runs[kTileTokens];
  int num_runs;
};

// One warp: lane i knows the slot of token i.  A run starts where the slot does not follow that of the token before, and
// at each multiple of side.run tokens within the page.
__device__ __forceinline__ void find_runs(const SlotMap& map, const SidePlan& side, int64_t slot, TokenTile& tile) {
  const uint32_t lane = threadIdx.x;
  int64_t page = 0;
  uint32_t offset = 0;
  const bool valid = map.locate(slot, page, offset);
  const int64_t mine = valid ? slot : -2;
  const int64_t before = __shfl_up_sync(~0u, mine, 1);
  const bool starts = valid && (lane == 0 || before + 1 != slot || (offset & (side.run - 1)) == 0);
  const uint32_t all_starts = __ballot_sync(~0u, starts), all_valid = __ballot_sync(~0u, valid);
  if (starts) {
    const uint32_t ends = (all_starts | ~all_valid) >> lane >> 1;
    const int length = ends ? __ffs(ends) : kTileTokens - lane;
    tile.runs[__popc(all_starts & ((1u << lane) - 1))] = {page * side.block + offset * side.token,
                                                          static_cast<int>(lane), length};
  }
  if (lane == 0) tile.num_runs = __popc(all_starts);
}

template <class Result>
__device__ __forceinline__ void store_in_tile(char* to, const Result& v) {
  if constexpr (sizeof(Result) > 4) {  // the pitch aligns rows to 4 bytes
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Result) / 4); ++i)
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(&v)[i];
  } else {
    *reinterpret_cast<Result*>(to) = v;
  }
}

// `length` elements of one column of the tile, to consecutive addresses.
template <class Stored>
__device__ __forceinline__ void store_run(char* to, const char* column, int length, int full_length) {
  constexpr int kMost = 16 / sizeof(Stored), kPerWord = 4 / sizeof(Stored);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kMost; ++i)
    if (i < length)
      words[i / kPerWord] |= uint32_t{*reinterpret_cast<const Stored*>(column + i * kTilePitch)}
                             << (i % kPerWord * 8 * sizeof(Stored));
  const int bytes = length * static_cast<int>(sizeof(Stored));
  if (length == full_length && bytes == 16) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  } else if (length == full_length && bytes == 8) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (i < length)
        reinterpret_cast<Stored*>(to)[i] =
            static_cast<Stored>(words[i / kPerWord] >> (i % kPerWord * 8 * sizeof(Stored)));
  }
}

template <class Mover>
__device__ __forceinline__ void transpose_tokens(const SlotMap& map, const SidePlan& side, const Scale* scale,
                                                 uint32_t block, TokenTile& tile) {
  using Stored = typename Mover::Stored;
  constexpr uint32_t kVectors = kTileColumns<Stored> / Mover::kWidth;
  uint32_t piece, head;
  const uint32_t first_token_tile = side.heads(side.pieces(block, piece), head);
  const int64_t first_token = int64_t{first_token_tile} * kTileTokens;
  const int64_t tokens = map.num_tokens - first_token < kTileTokens ? map.num_tokens - first_token : kTileTokens;
  const uint32_t first_column = piece * kTileColumns<Stored>;
  const uint32_t columns = min(side.head_size - first_column, static_cast<uint32_t>(kTileColumns<Stored>));
  const uint32_t vectors = columns / Mover::kWidth;

  // Asked for now, looked at once the tile's own loads are on their way.
  int64_t slot = -1;
  if (threadIdx.x < tokens) slot = map.slots[first_token + threadIdx.x];

  const Quotient quotient(scale ? (*scale)[head] : 1.0f);
  const char* from =
      side.data + head * side.data_head + first_token * side.data_token + int64_t{piece} * kVectors * side.data_vector;
  const uint32_t lane = threadIdx.x & ((1u << side.lanes_log2) - 1), row = threadIdx.x >> side.lanes_log2;
  const uint32_t rows = blockDim.x >> side.lanes_log2;
  for (uint32_t vector = lane; vector < vectors; vector += 1u << side.lanes_log2) {
    for (uint32_t token = row; token < tokens; token += 2 * rows) {
      typename Mover::Loaded loaded[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (token + i * rows < tokens)
          loaded[i] =
              load_vec<typename Mover::Loaded>(from + (token + i * rows) * side.data_token + vector * side.data_vector);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (token + i * rows < tokens)
          store_in_tile(tile.rows + (token + i * rows) * kTilePitch + vector * sizeof(typename Mover::Result),
                        Mover::convert(loaded[i], quotient));
    }
  }
  if (threadIdx.x < 32) find_runs(map, side, slot, tile);
  __syncthreads();

  // Threads go through the runs of one column, then those of the next: the runs of a page lie side by side.
  const uint32_t num_runs = tile.num_runs;
  if (num_runs == 0) return;
  char* cache = side.cache + head * side.head + first_column * side.chunk;
  uint32_t run = threadIdx.x % num_runs, column = threadIdx.x / num_runs;
  const uint32_t run_step = blockDim.x % num_runs, column_step = blockDim.x / num_runs;
  while (column < columns) {
    const Run r = tile.runs[run];
    store_run<Stored>(cache + r.to + column * side.chunk, tile.rows + r.first * kTilePitch + column * sizeof(Stored),
                      r.length, side.run);
    run += run_step;
    column += column_step;
    if (run >= num_runs) {
      run -= num_runs;
      ++column;
    }
  }
}

}  // namespace pykv
