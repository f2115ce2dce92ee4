// Tokens into a cache in which neighbouring tokens of a page lie side by side, element by element (packed values).
//
// Writing such a cache token by token would touch a 32-byte sector for each element.  A block of threads therefore turns
// a tile of tokens x 128 elements of a head around, first words in registers, then in shared memory, and writes runs: as
// many tokens in consecutive slots of a page as fit into one aligned store of 16 bytes.  In a prefill nearly all tokens
// lie in full runs; a token alone is a run too, so any slot mapping comes out right.  Pages that begin anywhere in the
// tile cost no more than others: a run is read as words and shifted into place.
//
// Tokens alone in their pages leave a sector of 32 bytes for each of their elements, in whatever order they are written: 8192 of
// them, 8 heads of 128 in bf16, take 108 us on an H200, side by side 19.  That is in the nature of this layout.
#pragma once

#include "cache/early.cuh"
#include "cache/writes/reshape_and_cache.cuh"

namespace pykv {

inline constexpr int kTileColumns = 128;
inline constexpr int kMostTileTokens = 64;
inline constexpr int kSection = 32;  // tokens among which one warp looks for runs

// Neighbouring tokens that share a word of the tile.
template <class Stored>
inline constexpr int kPerWord = 4 / sizeof(Stored);
// Words from column to column.  Odd: neither the rows written nor the columns read share banks.
template <class Stored>
inline constexpr int kTilePitch = kMostTileTokens / kPerWord<Stored> + 1;

struct Run {
  int64_t to;  // bytes from the cache's first element of this head
  int first, length;
};

struct Runs {
  Run runs[kMostTileTokens];  // those of a section follow one another
  int count[kMostTileTokens / kSection];
};

template <class Stored>
struct TokenTile : Runs {
  uint32_t columns[kTileColumns * kTilePitch<Stored> + 4];  // a run may be read past its end
};

// One warp: lane i knows the slot of token i of its section.  A run starts where the slot does not follow that of the
// token before, and at each multiple of side.run tokens within the page.
__device__ __forceinline__ void find_runs(const SlotMap& map, const SidePlan& side, int64_t slot, Runs& runs) {
  const uint32_t lane = threadIdx.x % 32, section = threadIdx.x / 32;
  int64_t page = 0;
  uint32_t offset = 0;
  const bool valid = map.locate(slot, page, offset);
  const int64_t mine = valid ? slot : -2;
  const int64_t before = __shfl_up_sync(~0u, mine, 1);
  const bool starts = valid && (lane == 0 || before + 1 != slot || (offset & (side.run - 1)) == 0);
  const uint32_t all_starts = __ballot_sync(~0u, starts), all_valid = __ballot_sync(~0u, valid);
  if (starts) {
    const uint32_t ends = (all_starts | ~all_valid) >> lane >> 1;
    const int length = ends ? __ffs(ends) : kSection - lane;
    const uint32_t in_group = offset & ((1u << side.group_log2) - 1);
    const int64_t to = page * side.block + (offset >> side.group_log2) * side.group + in_group * side.token;
    runs.runs[section * kSection + __popc(all_starts & ((1u << lane) - 1))] = {to, static_cast<int>(threadIdx.x),
                                                                               length};
  }
  if (lane == 0) runs.count[section] = __popc(all_starts);
}

// Vectors of neighbouring tokens to words of neighbouring columns: word j holds element j of each.
template <class Stored, int kWidth>
__device__ __forceinline__ void turn(const Vec<Stored, kWidth> (&tokens)[kPerWord<Stored>], uint32_t (&words)[kWidth]) {
  if constexpr (sizeof(Stored) == 4) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) words[j] = tokens[0][j];
  } else if constexpr (kWidth == 1) {
    words[0] = 0;
#pragma unroll
    for (int i = 0; i < kPerWord<Stored>; ++i) words[0] |= uint32_t{tokens[i][0]} << (i * 8 * sizeof(Stored));
  } else if constexpr (sizeof(Stored) == 2) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      words[j] = __byte_perm(tokens[0].words[j / 2], tokens[1].words[j / 2], 0x5410);
      words[j + 1] = __byte_perm(tokens[0].words[j / 2], tokens[1].words[j / 2], 0x7632);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      uint32_t pairs[2][2];  // of tokens; of columns
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pairs[i][0] = __byte_perm(tokens[2 * i].words[j / 4], tokens[2 * i + 1].words[j / 4], 0x5140);
        pairs[i][1] = __byte_perm(tokens[2 * i].words[j / 4], tokens[2 * i + 1].words[j / 4], 0x7362);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[j + 2 * i] = __byte_perm(pairs[0][i], pairs[1][i], 0x5410);
        words[j + 2 * i + 1] = __byte_perm(pairs[0][i], pairs[1][i], 0x7632);
      }
    }
  }
}

// Elements first ... first + length of a column of the tile, to consecutive addresses.
template <class Stored>
__device__ __forceinline__ void store_run(char* to, const uint32_t* column, int first, int length, int full_length) {
  constexpr int kMost = 16 / sizeof(Stored);
  uint32_t words[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = column[first / kPerWord<Stored> + i];
  if constexpr (kPerWord<Stored> > 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = __funnelshift_r(words[i], words[i + 1], first % kPerWord<Stored> * (8 * sizeof(Stored)));
  }
  const int bytes = length * static_cast<int>(sizeof(Stored));
  if (length == full_length && bytes == 16) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  } else if (length == full_length && bytes == 8) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= length) break;
      reinterpret_cast<Stored*>(to)[i] =
          static_cast<Stored>(words[i / kPerWord<Stored>] >> (i % kPerWord<Stored> * 8 * sizeof(Stored)));
    }
  }
}

template <class Mover, int kThreads>
__device__ __forceinline__ void transpose_tokens(const SlotMap& map, const SidePlan& side, const Scale* scale,
                                                 uint32_t block, TokenTile<typename Mover::Stored>& tile) {
  using Stored = typename Mover::Stored;
  using Loaded = typename Mover::Loaded;
  constexpr int kWidth = Mover::kWidth, kTokens = kPerWord<Stored>, kUnroll = kTokens == 1 ? 2 : 1;
  constexpr int kVectors = kTileColumns / kWidth, kWarps = kThreads / 32;
  uint32_t piece, head;
  const uint32_t tile_index = side.heads(side.pieces(block, piece), head);
  const int64_t first_token = int64_t{tile_index} << side.tile_tokens_log2;
  const int64_t rest = map.num_tokens - first_token;
  const int most = 1 << side.tile_tokens_log2, tokens = rest < most ? static_cast<int>(rest) : most;
  const int first_column = piece * kTileColumns;
  const int columns = min(static_cast<int>(side.head_size) - first_column, kTileColumns), vectors = columns / kWidth;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  const char* from =
      side.data + head * side.data_head + first_token * side.data_token + int64_t{piece} * kVectors * side.data_vector;
  if (comes_early() && gridDim.x <= kFewBlocks && static_cast<int>(threadIdx.x) < tokens) {
    map.prefetch_slot(first_token + threadIdx.x);
    if (side.data_vector == sizeof(Loaded)) prefetch(from + threadIdx.x * side.data_token, vectors * sizeof(Loaded));
  }
  begin_dependent();
  // Asked for now, looked at once the tile's own loads are on their way.
  int64_t slot = -1;
  if (static_cast<int>(threadIdx.x) < tokens) slot = map.slots[first_token + threadIdx.x];

  // A warp reads 4 vectors of 8 words' tokens at a time, and 2^lanes_log2 warps lie along the head.
  const Quotient quotient(scale ? (*scale)[head] : 1.0f);
  const int along = 1 << side.lanes_log2, step = (kWarps >> side.lanes_log2) * 8;
  for (int vector = (warp & (along - 1)) * 4 + lane % 4; vector < vectors; vector += along * 4) {
    for (int word = (warp >> side.lanes_log2) * 8 + lane / 4; word * kTokens < tokens; word += kUnroll * step) {
      Loaded loaded[kUnroll][kTokens];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          const int token = (word + u * step) * kTokens + i;
          if (token < tokens)
            loaded[u][i] = load_vec<Loaded>(from + token * side.data_token + vector * side.data_vector);
        }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if ((word + u * step) * kTokens >= tokens) break;
        typename Mover::Result results[kTokens];
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          if constexpr (kWidth == kWideVector) {
            results[i] = Mover::convert(loaded[u][i], quotient);
          } else {
            results[i] = Mover::convert_all(loaded[u][i], quotient);
          }
        }
        uint32_t words[kWidth];
        turn<Stored, kWidth>(results, words);
#pragma unroll
        for (int j = 0; j < kWidth; ++j)
          tile.columns[(vector * kWidth + j) * kTilePitch<Stored> + word + u * step] = words[j];
      }
    }
  }
  const int sections_log2 = max(static_cast<int>(side.tile_tokens_log2) - 5, 0);
  if (warp >> sections_log2 == 0) find_runs(map, side, slot, tile);
  __syncthreads();

  // A warp stores 16 columns of two runs at a time: whole sectors, be a page 16 or 32 bytes a column.
  const int section = warp & ((1 << sections_log2) - 1), num_runs = tile.count[section];
  char* cache = side.cache + head * side.head + first_column * side.chunk;
  for (int run = lane % 2; run < num_runs; run += 2) {
    const Run r = tile.runs[section * kSection + run];
    for (int column = (warp >> sections_log2) * 16 + lane / 2; column < columns;
         column += (kWarps * 16) >> sections_log2)
      store_run<Stored>(cache + r.to + column * side.chunk, tile.columns + column * kTilePitch<Stored>, r.first,
                        r.length, side.run);
  }
}

}  // namespace pykv
