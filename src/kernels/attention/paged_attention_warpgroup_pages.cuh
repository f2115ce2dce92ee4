// Tiles of rows of tokens for paged_attention_warpgroup.cuh, from pages of whole groups of eight tokens.
//
// Each copying warp has tokens of its own in every tile, and needs nothing of the others.  Its lanes look up the pages of its
// groups in the next tiles together, and ask for those after them while these are copied, for a line of the block table may come
// from memory; a tile then takes a multiplication for a group and an addition for a copy.
#pragma once

#include "attention/paged_attention_load.cuh"
#include "cuda/mbarrier.cuh"

namespace pykv::attention {

// A block's part of a segment.
struct KeysOfSegment {
  int sequence, first_token, tiles;  // 0: there is none
  int first_key, last_key;           // that some query sees and that are there

  __device__ explicit KeysOfSegment(const Walker& walker)
      : sequence(walker.unit.sequence),
        first_token(walker.unit.first_token),
        tiles(walker.unit.exists ? walker.in_segment : 0),
        first_key(walker.unit.first_key),
        last_key(min(walker.unit.last_key, walker.unit.sequence_len - 1)) {}
};

template <class S>
struct PageCopies {
  using Loader = TileLoader<S>;
  static constexpr int kRows = S::kTile / S::kCopyWarps;  // tokens of a warp in a tile
  static constexpr int kGroups = kRows / kGroupTokens, kTilesAhead = 32 / kGroups;
  static constexpr int kChunks = S::kRowBytes / 16, kAtOnce = 32 / kChunks,
                       kSteps = kGroupTokens / kAtOnce;  // rows; of a group

  const Problem& p;
  const CacheCopies& copies;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x - kThreads) / 32;
  const int chunk = lane % kChunks, row = lane / kChunks;  // of the copies of a group
  const char *key = nullptr, *value = nullptr;  // of the segment's head: this lane's chunk in a page's token `row`

  struct Lookup {
    PageEntry page;
    bool wanted;
  };

  // Of this lane's group in the segment's tile `first` + lane / kGroups.
  __device__ Lookup look_up(const KeysOfSegment& s, int first) const {
    const int tile = first + lane / kGroups;
    const int token = s.first_token + tile * S::kTile + warp * kRows + lane % kGroups * kGroupTokens;
    Lookup x{{0, 0}, tile < s.tiles && token + kGroupTokens - 1 >= s.first_key && token <= s.last_key};
    if (x.wanted) x.page = load_page(p, s.sequence, token);
    return x;
  }

  // The page's number, or -1 if there is nothing to read.
  __device__ int end_lookup(const Lookup& x) const {
    const int64_t id = x.page.id(p);
    const bool ok = x.wanted && id >= 0 && id < p.a.num_blocks;
    if (x.wanted && !ok) p.bad_block(id, p.a.num_blocks);
    return ok ? static_cast<int>(id) : -1;
  }

  __device__ void begin_segment(int head) {
    key = static_cast<const char*>(p.a.key.data) + head * copies.key_head + row * copies.key_token + chunk * 16;
    value = static_cast<const char*>(p.a.value.data) + head * copies.value_head + row * copies.value_token + chunk * 16;
  }

  static __device__ bool suits(const Problem& p, const CacheCopies& copies) {
    const int64_t strides = copies.key_block | copies.key_token | copies.value_block | copies.value_token;
    return p.block_size.d % kGroupTokens == 0 && p.a.num_blocks < int64_t{1} << 31 && strides >> 32 == 0;
  }

  // What this warp copies of a tile.
  struct Part {
    uint32_t rows;  // a bit for each of its tokens that is there and that some query sees
    const char *key[kGroups], *value[kGroups];

    __device__ bool is_whole() const { return rows == (1u << kRows) - 1; }
  };

  // Of the segment's tile j.
  __device__ Part part_of(const KeysOfSegment& s, int ids, int j) const {
    const int token = s.first_token + j * S::kTile + warp * kRows, of_tile = j % kTilesAhead * kGroups;
    const int first = max(s.first_key - token, 0), end = min(s.last_key - token + 1, kRows);
    Part x;
    x.rows = first < end ? (1u << end) - (1u << first) : 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int id = __shfl_sync(~0u, ids, of_tile + g), o = p.block_size.remainder(token + g * kGroupTokens);
      if (id < 0) x.rows &= ~(0xffu << g * kGroupTokens);
      x.key[g] = key + times(copies.key_block, id) + times(copies.key_token, o);
      x.value[g] = value + times(copies.value_block, id) + times(copies.value_token, o);
    }
    return x;
  }

  __device__ void store_valid(const Part& part, uint32_t* valid) const {
    static_assert(kRows == 16);
    if (lane == 0) reinterpret_cast<uint16_t*>(valid)[warp] = static_cast<uint16_t>(part.rows);
  }

  __device__ void copy(uint32_t stage, const Part& part) const {
    if (part.is_whole() && copies.head_bytes == S::kRowBytes) {
      copy_groups<false>(stage, part);
    } else {
      copy_groups<true>(stage, part);
    }
  }

 private:
  template <bool kChecked>
  __device__ void copy_groups(uint32_t stage, const Part& part) const {
    const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int r = g * kGroupTokens + i * kAtOnce + row;
        const uint32_t to = stage + Loader::row_place(warp * kRows + r, chunk);
        const bool read = !kChecked || (in_head && (part.rows >> r & 1));
        copy_chunk<kChecked>(to, part.key[g] + i * kAtOnce * copies.key_token, read);
        copy_chunk<kChecked>(to + S::kTileBytes, part.value[g] + i * kAtOnce * copies.value_token, read);
      }
    }
  }

  template <bool kChecked>
  __device__ void copy_chunk(uint32_t to, const char* from, bool read) const {
    if constexpr (S::kRowBytes % 128 != 0) {
      cp_async_16_of_row(to, read ? from : static_cast<const char*>(p.a.key.data), read);
    } else if constexpr (kChecked) {
      cp_async_16_once(to, read ? from : static_cast<const char*>(p.a.key.data), read);
    } else {
      cp_async_16_once(to, from);
    }
  }
};

}  // namespace pykv::attention
