// Decoding proper: from pages to a warp's stages, and from there to its arithmetic.
//
// A tile that is all there takes one multiplication for eight tokens and one addition for a copy.
#pragma once

#include "attention/cuda/decode/columns.cuh"
#include "attention/cuda/decode/pages.cuh"
#include "attention/cuda/decode/results.cuh"

namespace pykv::attention {

// From the block table to a stage.
template <class S>
struct DecodeLoader {
  using Tiles = TileLoader<S>;
  using Queries = ColumnQueries<S>;
  using State = typename Queries::State;
  using Pages = typename DecodePages<S>::Pages;
  static constexpr int kD = S::kD, kTile = S::kTile, kGroups = DecodePages<S>::kGroups;
  static constexpr int kQueryTiles = Queries::kQueryTiles;

  const Problem& p;
  const CacheCopies& copies;
  const int lane = threadIdx.x % 32;
  DecodePages<S> table{p, copies, lane};
  Tiles tiles{p, copies};
  Queries queries{p};
  QueryColumns<S> columns{p, copies};

  // Starts the copies of a tile; of rows of tokens, from byte `from` to `to` of a head.
  __device__ void load(uint32_t stage, const TilePart& part, const Pages& pages) const {
    load(stage, part, pages, 0, copies.head_bytes);
  }
  __device__ void load(uint32_t stage, const TilePart& part, const Pages& pages, int from, int to) const {
    const char *key[kGroups], *value[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t id = pages.id[g];
      const int o = p.block_size.remainder(part.first_token + g * kGroupTokens);
      key[g] = static_cast<const char*>(p.a.key.data) + id * copies.key_block + o * copies.key_token +
               part.kv_head * copies.key_head;
      value[g] = static_cast<const char*>(p.a.value.data) + id * copies.value_block + o * copies.value_token +
                 part.kv_head * copies.value_head;
    }
    const auto copy = [&](uint32_t place, const char* source, bool read) {
      cp_async_16_once(place, read ? source : static_cast<const char*>(p.a.key.data), read);
    };
    constexpr int kChunks = Tiles::kChunks, kCopies = Tiles::kCopies;
    if constexpr (!S::kPackedV) {  // neighbouring lanes take neighbouring chunks of a token
      constexpr int kRows = 32 / kChunks;
      const int chunk = lane % kChunks, r0 = lane / kChunks;
      const bool in_head = (!S::kFolded || chunk * 16 >= from) && chunk * 16 < to;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int r = r0 + i * kRows, g = i * kRows / kGroupTokens, in_group = r0 + i * kRows % kGroupTokens;
        const bool read = in_head && (part.valid >> r & 1);
        copy(stage + Tiles::key_place(r, chunk), key[g] + in_group * copies.key_token + chunk * 16, read);
        copy(stage + S::kTileBytes + swizzled<S::kRowBytes>(r, chunk),
             value[g] + in_group * copies.value_token + chunk * 16, read);
      }
    } else {
      const auto of_group = [](const char* const(&pages_at)[kGroups], int group) {
        const char* x = pages_at[0];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) x = group == g ? pages_at[g] : x;
        return x;
      };
      const int token = lane % kTile, r = place_of<S>(token);
      const char* row = of_group(key, token / kGroupTokens) + token % kGroupTokens * copies.key_token;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int chunk = lane / kTile + i * (32 / kTile);
        copy(stage + Tiles::key_place(r, chunk), row + chunk * copies.key_chunk,
             chunk * 16 < copies.head_bytes && (part.valid >> r & 1));
      }
      constexpr int kChunk = 16 / S::kBytes;
      const int shift = copies.value_chunk_shift;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int x = (lane + i * 32) >> shift, d = x % kD, c = (lane & ((1 << shift) - 1)) + (x / kD << shift);
        copy(stage + S::kTileBytes + tiles.packed_value_place(d, c),
             of_group(value, c * kChunk / kGroupTokens) + d * copies.value_dim,
             d < p.a.head_size && (part.valid >> c * kChunk & ((1u << kChunk) - 1)) != 0);
      }
    }
  }

  // The same where all is there: rows of tokens, a page's id for each eight of them.  kLines: rows are whole lines; else there
  // may be less than kD of a head, and zeros come for the rest.  Half a line is asked for with the other half where blocks go
  // along neighbouring heads at about the same time, which is so on the line.
  template <bool kLines>
  __device__ void load_whole(uint32_t stage, int kv_head, int first_token, const Pages& pages) const {
    constexpr int kChunks = Tiles::kChunks, kRows = 32 / kChunks;  // rows of a step of the warp
    const int chunk = lane % kChunks, r0 = lane / kChunks;
    const char* key = static_cast<const char*>(p.a.key.data) + times(copies.key_head, kv_head) +
                      times(copies.key_token, r0) + chunk * 16;
    const char* value = static_cast<const char*>(p.a.value.data) + times(copies.value_head, kv_head) +
                        times(copies.value_token, r0) + chunk * 16;
    [[maybe_unused]] const bool in_head = chunk * 16 < copies.head_bytes;
    const uint64_t key_step = kRows * copies.key_token, value_step = kRows * copies.value_token;
    int o = p.block_size.remainder(first_token);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const char* k = key + times(copies.key_block, pages.id[g]) + times(copies.key_token, o);
      const char* v = value + times(copies.value_block, pages.id[g]) + times(copies.value_token, o);
#pragma unroll
      for (int i = 0; i < kGroupTokens / kRows; ++i) {
        const int at = swizzled<S::kRowBytes>(r0 + g * kGroupTokens + i * kRows, chunk);
        if constexpr (kLines) {
          cp_async_16_once(stage + at, k + i * key_step);
          cp_async_16_once(stage + S::kTileBytes + at, v + i * value_step);
        } else if constexpr (S::kHalfLinesMeet) {
          cp_async_16_once(stage + at, k + i * key_step, in_head);
          cp_async_16_once(stage + S::kTileBytes + at, v + i * value_step, in_head);
        } else {
          cp_async_16_of_row(stage + at, k + i * key_step, in_head);
          cp_async_16_of_row(stage + S::kTileBytes + at, v + i * value_step, in_head);
        }
      }
      o = o + kGroupTokens == p.a.block_size ? 0 : o + kGroupTokens;
    }
  }

  // Rows of tokens, whole tiles or not, each of which has its page looked up, by the lane of its place: `id`.  Returns the bits
  // of the places with a key.
  __device__ uint32_t load_by_token(uint32_t stage, const TilePart& part, int id) const {
    const int token = part.first_token + lane;
    const bool is_key = lane < kTile && token < part.len && table.is_seen(part, token);
    const bool good = static_cast<uint32_t>(id) < static_cast<uint32_t>(p.a.num_blocks);
    if (is_key && !good) [[unlikely]]
      table.report_page(part.sequence, token);
    const uint32_t valid = __ballot_sync(~0u, is_key && good);
    if (valid == 0) return 0;
    uint64_t key_row = 0, value_row = 0;  // from the head's first
    if (is_key && good) {
      const int o = p.block_size.remainder(token);
      key_row = times(copies.key_block, id) + times(copies.key_token, o);
      value_row = times(copies.value_block, id) + times(copies.value_token, o);
    }
    constexpr int kChunks = Tiles::kChunks, kRows = 32 / kChunks;  // rows of a step of the warp
    const int chunk = lane % kChunks, r0 = lane / kChunks;
    const char* key = static_cast<const char*>(p.a.key.data) + times(copies.key_head, part.kv_head) + chunk * 16;
    const char* value = static_cast<const char*>(p.a.value.data) + times(copies.value_head, part.kv_head) + chunk * 16;
    const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll
    for (int i = 0; i < Tiles::kCopies; ++i) {
      const int r = r0 + i * kRows, at = swizzled<S::kRowBytes>(r, chunk);
      const bool read = in_head && (valid >> r & 1);
      cp_async_16_once(stage + at, key + __shfl_sync(~0u, key_row, r), read);
      cp_async_16_once(stage + S::kTileBytes + at, value + __shfl_sync(~0u, value_row, r), read);
    }
    return valid;
  }

  // A tile that is all there of packed pages of any multiple of kPart tokens.
  template <int kPart>
  __device__ void load_parts_of_pages(uint32_t stage, int kv_head, int first_token, const Pages& pages) const {
    constexpr int kSideBySide = kPart * S::kBytes / 16, kPartCopies = kPart * S::kRowBytes / 512;
    constexpr int kChunkStep = 32 / kPart, kDimStep = 32 / kSideBySide;
    const int chunk = lane / kPart, d = lane / kSideBySide, side = lane % kSideBySide;
    const char* key = static_cast<const char*>(p.a.key.data) + times(copies.key_head, kv_head) +
                      times(copies.key_token, lane % kPart) + times(copies.key_chunk, chunk);
    const char* value = static_cast<const char*>(p.a.value.data) + times(copies.value_head, kv_head) + side * 16 +
                        times(copies.value_dim, d);
    const uint32_t key_to = stage + Tiles::key_place(place_of<S>(lane % kPart), chunk);
#pragma unroll
    for (int t = 0; t < kTile / kPart; ++t) {
      const int id = pages.id[t * kPart / kGroupTokens], o = p.block_size.remainder(first_token + t * kPart);
      const char* k = key + times(copies.key_block, id) + times(copies.key_token, o);
      const char* v = value + times(copies.value_block, id) + o * S::kBytes;
      const uint32_t value_to =
          stage + S::kTileBytes + tiles.packed_value_place(d, t * kSideBySide + side, kSideBySide / 2);
#pragma unroll
      for (int i = 0; i < kPartCopies; ++i) {
        cp_async_16_once(key_to + (t * kPart + i * kChunkStep * kTile) * 16,
                         k + times(copies.key_chunk, i * kChunkStep),
                         (chunk + i * kChunkStep) * 16 < copies.head_bytes);
        cp_async_16_once(value_to + i * 512, v + times(copies.value_dim, i * kDimStep),
                         d + i * kDimStep < p.a.head_size);
      }
    }
  }

  // nvfp4: codes and scales as they are (decode/nvfp4_tile.cuh).  kWhole: all pages are there; of others come those that
  // are, with tokens past the end of the sequence.
  template <bool kWhole>
  __device__ void load_codes(uint32_t stage, const TilePart& part, const Pages& pages) const {
    load_codes<kWhole, true>(stage, p.a.key.data, copies.key_block, p.a.key_page, part, pages);
    load_codes<kWhole, false>(stage + S::kTileBytes, p.a.value.data, copies.value_block, p.a.value_page, part, pages);
  }

  // Those of keys or of values.
  template <bool kWhole, bool kKeys>
  __device__ void load_codes(uint32_t to, const void* cache, int64_t block, const Nvfp4Page& page, const TilePart& part,
                             const Pages& pages) const {
    using Tile = Nvfp4Tile<kD, kTile>;
    constexpr int kPieces = Tile::kPieces, kRows = 32 / kPieces;  // rows of a step of the warp
    // The warp beside this one, or this one, reads the rest of a line.
    constexpr bool kLines = S::kHeads > 1 || kD == 256;
    constexpr bool kTwoGroups = kRows > kGroupTokens, kTwoSteps = kRows < kGroupTokens;
    const char* nowhere = static_cast<const char*>(cache);
    const auto is_there = [&](int id, int place) {
      return kWhole ||
             (static_cast<uint32_t>(id) < static_cast<uint32_t>(p.a.num_blocks) && part.first_token + place < part.len);
    };
    const int piece = lane % kPieces, r0 = lane / kPieces;
    const bool in_head = kD <= 128 || piece * 32 < p.a.head_size;  // others are whole
    const char* codes =
        nowhere + times(page.codes_head, part.kv_head) + times(page.codes_token, r0 % kGroupTokens) + piece * 16;
    const uint32_t even_to = to + Tile::code_place(place_of<S>(r0), piece);
    const uint32_t odd_to = to + Tile::code_place(place_of<S>(r0 + kRows), piece) - kRows * Tile::kRowBytes;
    const int lane_group = kTwoGroups ? r0 / kGroupTokens : 0;
    int o = p.block_size.remainder(part.first_token + lane_group * kGroupTokens);  // in its page
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      constexpr int kStep = kTwoGroups ? kRows : kGroupTokens;
      const int g = i * kRows / kGroupTokens;
      const bool again = kTwoSteps && i % 2 == 1;
      int id = pages.id[g];
      if constexpr (kTwoGroups) id = lane_group > 0 ? pages.id[g + 1] : id;
      if (i > 0 && !again) {
        o += kStep;
        if (o >= p.a.block_size) o -= p.a.block_size;
        if (kTwoGroups && o >= p.a.block_size) o -= p.a.block_size;  // pages of eight
      }
      const char* from = codes + times(block, id) + times(page.codes_token, o);
      if (again) from += times(page.codes_token, kRows);
      const uint32_t at = (again ? odd_to : even_to) + i * kRows * Tile::kRowBytes;
      const bool read = in_head && is_there(id, (g + lane_group) * kGroupTokens);
      if constexpr (kLines) {
        cp_async_16_once(at, read ? from : nowhere, read);
      } else {
        cp_async_16_of_row(at, read ? from : nowhere, read);
      }
    }
    if (lane >= kTile) return;
    // Of scales there are as many rows as tokens: one for each lane.
    const bool read = is_there(pages.own, lane & -kGroupTokens);
    const char* scales = nowhere + page.scales + times(page.scales_head, part.kv_head) + times(block, pages.own) +
                         times(page.scales_token, p.block_size.remainder(part.first_token + lane));
    if (!read) scales = nowhere;
    if (kD <= 128 || p.a.head_size == kD) {
      cp_async_small<kD / 16>(to + Tile::key_scale_place(lane, 0), scales, read);
    } else {  // 192 elements: the last blocks of a key, and of each four values, are none
      constexpr int kWords = 192 / 64;
#pragma unroll
      for (int w = 0; w < kD / 64; ++w) {
        const bool in_row = w < kWords;
        const int s = in_row ? lane % 4 * kWords + w : kD / 16 - 4 + lane % 4;
        const uint32_t place = kKeys ? Tile::key_scale_place(lane, w * 4) : Tile::value_scale_place(lane / 4, s);
        cp_async_small<4>(to + place, in_row ? scales + w * 4 : nowhere, in_row && read);
      }
    }
  }

  // Starts the copies of a tile, the i-th of those whose pages the lanes have looked up together; returns the bits of its
  // places with a key.
  __device__ uint32_t start(uint32_t stage, TilePart& part, int ids, int i) const {
    if constexpr (S::kByToken) return load_by_token(stage, part, ids);
    return start(stage, part, table.pages_of(ids, i));
  }
  __device__ uint32_t start(uint32_t stage, TilePart& part, const Pages& pages) const {
    bool whole = table.is_seen(part, part.first_token) && part.first_token + kTile <= part.len &&
                 (!S::kPackedV || copies.part_tokens > 0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      whole = whole && static_cast<uint32_t>(pages.id[g]) < static_cast<uint32_t>(p.a.num_blocks);
    }
    if (whole) {
      if constexpr (S::kRaw) {
        load_codes<true>(stage, part, pages);
      } else if constexpr (S::kPackedV) {
        if (kTile == 16 || copies.part_tokens == 16) {
          load_parts_of_pages<16>(stage, part.kv_head, part.first_token, pages);
        } else {
          load_parts_of_pages<kTile>(stage, part.kv_head, part.first_token, pages);
        }
      } else {
        if (S::kRowBytes % 128 == 0 && copies.head_bytes == S::kRowBytes) {
          load_whole<true>(stage, part.kv_head, part.first_token, pages);
        } else {
          load_whole<false>(stage, part.kv_head, part.first_token, pages);
        }
      }
      return kTile == 32 ? ~0u : (1u << kTile % 32) - 1;
    }
    part.valid = table.valid_places(part, pages);
    if (part.valid != 0) {
      if constexpr (S::kRaw) {
        load_codes<false>(stage, part, pages);
      } else {
        load(stage, part, pages);
      }
    }
    return part.valid;
  }

  // When a segment is over: with two KV heads in a tile (decode/shape.cuh), what is no number has, times zero, come into sums
  // that it has nothing to do with, and into the weights of the other head's queries.  Such sums, which are rare, are made again, for
  // one head after the other, from the warp's tiles, at `first`, `first` + `step`, ... up to `last`, by way of a stage that is free.
  __device__ void separate(uint32_t stage, const TilePart& part, int first, int step, int last, State& state) const {
    constexpr bool kFinite = std::is_same_v<typename S::Element, Element8<KvFormat::kInt8>>;  // all codes
    if constexpr (!kFinite && S::kFolded) {
      if (!ColumnResults<S>::are_finite(state)) separate_heads(stage, part, first, step, last, state);
    }
  }

  // Only byte `from` to `to` of each key and value.
  __device__ void attend_again(uint32_t stage, TilePart part, int first, int step, int last, int from, int to,
                               State& state) const {
#pragma unroll 1
    for (part.first_token = first; part.first_token <= last; part.first_token += step) {
      const int token = table.token_to_look_up(0, [&](int) { return part.first_token; });
      __syncwarp();
      const Pages pages = table.pages_of(token < part.len ? table.look_up(part.sequence, token) : -1, 0);
      part.valid = table.valid_places(part, pages);
      if (part.valid != 0) load(stage, part, pages, from, to);
      cp_async_commit();
      cp_async_wait<0>();
      __syncwarp();
      if (part.valid == 0) continue;
      columns.compute(stage, part.valid, part.kv_head, part.first_token, part.len, state);
    }
    __syncwarp();
  }

  __device__ void separate_heads(uint32_t stage, const TilePart& part, int first, int step, int last,
                                 State& state) const {
    struct Kept {
      float maximum, sum, o[2 * Queries::kSums];
    };
    Kept memory[kQueryTiles][2], (*kept)[2] = memory;
    asm volatile("" : "+l"(kept)::"memory");  // registers are for the other tiles
    const int bytes = copies.head_bytes / 2;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      Queries::clear_sums(state);
      attend_again(stage, part, first, step, last, half * bytes, (half + 1) * bytes, state);
#pragma unroll
      for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (half == 1 && queries.half_of(queries.column_of(i, e)) == 0) continue;
          Kept& to = kept[i][e];
          to.maximum = state.maximum[i][e];
          to.sum = state.sum[i][e];
#pragma unroll
          for (int n = 0; n < Queries::kSums; ++n) {
            to.o[2 * n] = state.o[i][n][e];
            to.o[2 * n + 1] = state.o[i][n][2 + e];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Kept& from = kept[i][e];
        state.maximum[i][e] = from.maximum;
        state.sum[i][e] = from.sum;
#pragma unroll
        for (int n = 0; n < Queries::kSums; ++n) {
          state.o[i][n][e] = from.o[2 * n];
          state.o[i][n][2 + e] = from.o[2 * n + 1];
        }
      }
    }
  }

  // A tile that has arrived, at `stage` of a ring.
  __device__ void attend(char* ring, int offset, const TilePart& part, State& state) const {
    if (part.valid == 0) return;
    char* stage = ring + offset;
    if constexpr (S::kPackedV) {
      const typename Tiles::Valid valid = {part.valid};
      if (!Tiles::is_whole(valid)) {
        tiles.clear_invisible(stage + S::kTileBytes, valid);
        __syncwarp();
      }
    }
    columns.compute(shared_address(stage), part.valid, part.kv_head, part.first_token, part.len, state);
  }
};

}  // namespace pykv::attention
