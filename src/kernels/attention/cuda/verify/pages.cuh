// Tiles of rows of tokens for verify/kernel.cuh, from pages of whole groups of eight tokens.
//
// Each copying warp has tokens of its own in every tile, and needs nothing of the others.  Each of its lanes looks up one group of
// the next tiles, asks for the one after it while these are copied, for a line of the block table may come from memory, and
// notes in shared memory where the group is: a copy then takes an addition.
#pragma once

#include "attention/cuda/tile_loader.cuh"
#include "cuda/mbarrier.cuh"

namespace pykv::attention {

// A block's part of a segment.
struct KeysOfSegment {
  int sequence, first_token, tiles;  // 0: there is none
  int first_key, last_key;           // that some query sees and that are there

  __device__ explicit KeysOfSegment(const auto& walker)
      : sequence(walker.unit.sequence),
        first_token(walker.unit.first_token),
        tiles(walker.unit.exists ? walker.in_segment : 0),
        first_key(walker.unit.first_key),
        last_key(min(walker.unit.last_key, walker.unit.sequence_len - 1)) {}
};

// Where a group's keys and values begin, in the segment's head.
struct GroupPlaces {
  const char *key, *value;
};

// What a copying warp has looked up: a place for each lane.
struct alignas(16) FoundGroups {
  GroupPlaces places[32];
  uint8_t rows[32];  // a bit for each token that is there and that some query sees
};

template <class S>
struct PageCopies {
  using Loader = TileLoader<S>;
  static constexpr int kRows = S::kTile / S::kCopyWarps;  // tokens of a warp in a tile
  static constexpr int kGroups = kRows / kGroupTokens, kTilesAhead = 32 / kGroups;
  static constexpr int kChunks = S::kRowBytes / 16, kAtOnce = 32 / kChunks,
                       kSteps = kGroupTokens / kAtOnce;  // rows; of a group
  using Rows = uint16_t;                                 // FoundGroups::rows of a tile
  static_assert(kGroups == sizeof(Rows));

  const Problem& p;
  const CacheCopies& copies;
  FoundGroups& found;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kThreads) / 32;
  const int chunk = lane % kChunks, row = lane / kChunks;  // of the copies of a group

  struct Lookup {
    PageEntry page;
    bool wanted;
  };

  __device__ int token_of(const KeysOfSegment& s, int tile) const {
    return s.first_token + (tile + lane / kGroups) * S::kTile + warp * kRows + lane % kGroups * kGroupTokens;
  }

  // Of this lane's group in the segment's tiles from `tile` on.
  __device__ Lookup look_up(const KeysOfSegment& s, int tile) const {
    const int token = token_of(s, tile);
    const bool in_tiles = tile + lane / kGroups < s.tiles;
    Lookup x{{0, 0}, in_tiles && token + kGroupTokens - 1 >= s.first_key && token <= s.last_key};
    if (x.wanted) x.page = load_page(p, s.sequence, token);
    return x;
  }

  // Notes where the groups are.
  __device__ void end_lookup(const Lookup& x, const KeysOfSegment& s, int tile, int head) const {
    const int64_t id = x.page.id(p);
    const bool ok = x.wanted && id >= 0 && id < p.a.num_blocks;
    if (x.wanted && !ok) p.bad_block(id, p.a.num_blocks);
    const int token = token_of(s, tile), page = ok ? static_cast<int>(id) : 0, o = p.block_size.remainder(token);
    const int first = max(s.first_key - token, 0), end = min(s.last_key - token + 1, kGroupTokens);
    __syncwarp();  // nobody reads what was there before
    found.places[lane] = {static_cast<const char*>(p.a.key.data) + head * copies.key_head +
                              times(copies.key_block, page) + times(copies.key_token, o),
                          static_cast<const char*>(p.a.value.data) + head * copies.value_head +
                              times(copies.value_block, page) + times(copies.value_token, o)};
    found.rows[lane] = static_cast<uint8_t>(ok && first < end ? (1u << end) - (1u << first) : 0);
    __syncwarp();
  }

  static __device__ bool suits(const Problem& p, const CacheCopies& copies) {
    const int64_t strides = copies.key_block | copies.key_token | copies.value_block | copies.value_token;
    return p.block_size.d % kGroupTokens == 0 && p.a.num_blocks < int64_t{1} << 31 && strides >> 32 == 0;
  }

  // Of the segment's tile j.
  __device__ Rows rows_of(int j) const { return reinterpret_cast<const Rows*>(found.rows)[j % kTilesAhead]; }

  __device__ void store_valid(Rows rows, uint32_t* valid) const {
    if (lane == 0) reinterpret_cast<Rows*>(valid)[warp] = rows;
  }

  __device__ void copy(uint32_t stage, int j, Rows rows) const {
    if (rows != kAllRows) {
      copy_groups(stage, j, [&](uint32_t to, const char* from, int r) {
        const bool read = in_head() && (rows >> r & 1);
        copy_of_head(to, read ? from : static_cast<const char*>(p.a.key.data), read);
      });
    } else if (S::kRowBytes < 128 || copies.head_bytes != S::kRowBytes) {
      copy_groups(stage, j, [&](uint32_t to, const char* from, int) { copy_of_head(to, from, in_head()); });
    } else {
      copy_groups(stage, j, [&](uint32_t to, const char* from, int) { cp_async_16_once(to, from); });
    }
  }

 private:
  static constexpr Rows kAllRows = 0xffff;

  __device__ bool in_head() const { return chunk * 16 < copies.head_bytes; }

  // Of heads that may end within lines, which others read on: of one byte, where most of a head is in a line, they will find it in the
  // L2.
  static __device__ void copy_of_head(uint32_t to, const char* from, bool read) {
    if constexpr (S::kRowBytes == 128) {
      cp_async_16_once(to, from, read);
    } else {
      cp_async_16_of_row(to, from, read);
    }
  }

  // copy_chunk(to, from, r): of row r of this warp's.
  __device__ void copy_groups(uint32_t stage, int j, auto&& copy_chunk) const {
    const int64_t key = row * copies.key_token + chunk * 16, value = row * copies.value_token + chunk * 16;
    const GroupPlaces* places = found.places + j % kTilesAhead * kGroups;
    GroupPlaces x[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) x[g] = places[g];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int r = g * kGroupTokens + i * kAtOnce + row;
        const uint32_t to = stage + Loader::row_place(warp * kRows + r, chunk);
        copy_chunk(to, x[g].key + key + i * kAtOnce * copies.key_token, r);
        copy_chunk(to + S::kTileBytes, x[g].value + value + i * kAtOnce * copies.value_token, r);
      }
    }
  }
};

}  // namespace pykv::attention
