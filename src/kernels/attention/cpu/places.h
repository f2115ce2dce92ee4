// Where the keys and values of a tile lie, and in which order the heads of an item fetch the next.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/cpu/nvfp4.h"
#include "attention/cpu/problem.h"
#include "attention/cpu/tile.h"

namespace pykv::PYKV_ISA::attention {

template <class T>
inline constexpr bool kIsNvfp4 = std::is_same_v<T, Nvfp4>;

// The row of a key that must not be read: zero bits are zero in every type.
inline constexpr int kMaxHeadSize = 1024;
alignas(64) inline constexpr float kZeros[kMaxHeadSize] = {};

// Where some neighbouring keys lie, before a head is chosen.  The first is a multiple of kTile, so that a row's sums are
// added up in the same order whatever other rows see; keys before those of the item are not looked up.
struct Tile {
  int64_t first;
  int count;
  bool some_missing;
  bool missing[kTile];               // the block id is out of range, or nobody asks
  int slot[kTile];                   // within the block
  int64_t key[kTile], value[kTile];  // elements from the start of the cache
};

inline void locate(const Problem& p, const Sequence& s, Span keys, Tile& tile) {
  const PagedAttentionArgs& a = p.args;
  const Index table = {a.block_tables.data, 1, a.block_tables.is_int64};
  tile.first = keys.begin / kTile * kTile;
  tile.count = static_cast<int>(std::min(keys.end, tile.first + kTile) - tile.first);
  const int unseen = static_cast<int>(keys.begin - tile.first);
  tile.some_missing = unseen > 0;
  for (int j = 0; j < unseen; ++j) {
    tile.missing[j] = true;
    tile.slot[j] = static_cast<int>((tile.first + j) % a.block_size);
    tile.key[j] = tile.value[j] = 0;
  }
  int64_t page = keys.begin / a.block_size;
  int slot = static_cast<int>(keys.begin % a.block_size);
  for (int j = unseen; j < tile.count; ++page, slot = 0) {
    const int64_t block = read_once(table, s.index * a.block_table_stride + page * a.block_tables.stride);
    const bool missing = block < 0 || block >= a.num_blocks;
    if (missing) p.bad_block(block, a.num_blocks);
    tile.some_missing |= missing;
    for (; j < tile.count && slot < a.block_size; ++j, ++slot) {
      tile.missing[j] = missing;
      tile.slot[j] = slot;
      tile.key[j] = missing ? 0 : block * a.key.block + slot * a.key.token;
      tile.value[j] = missing ? 0 : block * a.value.block + slot * a.value.token;
    }
  }
}

// The same for one KV head, ready to be read.
template <class T>
struct TileRows {
  int count;   // keys
  int padded;  // rows, in whole vectors of scores
  bool some_hidden;
  bool hidden[kTile];
  const T* key[kTile];
  const T* value[kTile];
};

template <class T>
void point_at(const Problem& p, const Sequence& s, const Tile& tile, int kv_head, TileRows<T>& rows) {
  const PagedAttentionArgs& a = p.args;
  const T* const keys = static_cast<const T*>(a.key.data) + kv_head * a.key.head;
  const T* const values = static_cast<const T*>(a.value.data) + kv_head * a.value.head;
  rows.count = tile.count;
  rows.padded = static_cast<int>(round_up(tile.count, kKeys));
  for (int j = 0; j < tile.count; ++j) {
    rows.key[j] = keys + tile.key[j];
    rows.value[j] = values + tile.value[j];
  }
  rows.some_hidden = tile.some_missing || p.sparse() || rows.padded > rows.count;
  if (!rows.some_hidden) return;
  for (int j = 0; j < rows.padded; ++j) {
    bool hidden = j >= tile.count || tile.missing[j];
    if (!hidden && p.sparse()) {
      hidden = true;
      for (int g = 0; g < p.group && hidden; ++g)
        hidden = !p.sees(s, kv_head * p.group + g, tile.first + j - tile.slot[j]);
    }
    rows.hidden[j] = hidden;
    if (hidden) rows.key[j] = rows.value[j] = reinterpret_cast<const T*>(kZeros);
  }
}

// The part of head number h of `heads` in fetching a tile.  Where the heads of a token lie side by side, a head takes some
// tokens with all heads, otherwise all tokens of that head.  In the packed layouts a row is scattered over its page, and
// each token answers for an equal part of the page.
template <class T, class View>
void share(const Problem& p, const Item& item, const Tile& tile, const int64_t* offsets, const View& view, bool packed,
           int h, Fetch& fetch) {
  const int heads = item.last_head - item.first_head, size = p.args.head_size / (kIsNvfp4<T> ? 2 : 1);
  const bool side_by_side = !packed && view.head < view.token;
  const int head = item.first_head + (side_by_side ? 0 : h);
  const int begin = side_by_side ? tile.count * h / heads : 0;
  const int end = side_by_side ? tile.count * (h + 1) / heads : tile.count;
  const int64_t row = (side_by_side ? (heads - 1) * view.head : 0) + size;  // elements for one token
  const int64_t token = packed ? size : view.token;
  for (int j = begin; j < end;) {
    const int run = token == row ? std::min(end - j, p.args.block_size - tile.slot[j]) : 1;  // tokens without a gap
    const int64_t offset = offsets[j] + head * view.head + tile.slot[j] * (token - view.token);
    if (!tile.missing[j]) fetch.add(static_cast<const T*>(view.data) + offset, run * row * sizeof(T));
    j += run;
  }
}

}  // namespace pykv::PYKV_ISA::attention
