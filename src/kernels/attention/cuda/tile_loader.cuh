// From the block table to a tile of keys and values in shared memory.
//
// A tile comes by 16-byte asynchronous copies; the look-up of its pages runs ahead of them, into a slot.  A stage holds
// rows of tokens, swizzled so that ldmatrix meets no bank twice, or, for packed caches, their own order: a copy by
// neighbouring threads is then one line to one line, and ldmatrix, too, reads whole lines.  Only nvfp4 comes through
// registers, where it becomes halves.
#pragma once

#include "attention/cuda/rows.cuh"
#include "attention/cuda/tile_shape.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/nvfp4.cuh"

namespace pykv::attention {

constexpr int kGroupTokens = 8;  // looked up and addressed as one

// A stride of the cache, taken so often; both fit in 32 bits.
__device__ inline uint64_t times(int64_t stride, int n) {
  return static_cast<uint64_t>(static_cast<uint32_t>(stride)) * static_cast<uint32_t>(n);
}

template <class S>
struct TileLoader {
  static constexpr int kD = S::kD, kTile = S::kTile, kTeam = S::kTeam;
  using TileSlot = Slot<kTile>;

  const Problem& p;
  const CacheCopies& copies;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();
  const int member = threadIdx.x % kTeam;  // of the team

  // Of a token in a page.
  __device__ const char* key_row(int64_t id, int token, int kv_head) const {
    return static_cast<const char*>(p.a.key.data) + id * copies.key_block +
           p.block_size.remainder(token) * copies.key_token + kv_head * copies.key_head;
  }
  __device__ const char* value_row(int64_t id, int token, int kv_head) const {
    return static_cast<const char*>(p.a.value.data) + id * copies.value_block +
           p.block_size.remainder(token) * copies.value_token + kv_head * copies.value_head;
  }

  static __device__ void sync_team() {
    if constexpr (kTeam == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // ---- look-up of pages ---------------------------------------------------------------------------------------------

  struct Lookup {
    PageEntry page;
    int token;
    bool wanted, visible;
  };

  __device__ Lookup begin_lookup(const Unit& u) const {
    Lookup x{{0, 0}, 0, false, false};
    if (member >= kTile) return x;
    return begin_lookup_of(u, member);
  }

  // Of the token at place r.
  __device__ Lookup begin_lookup_of(const Unit& u, int r) const {
    Lookup x{{0, 0}, 0, false, false};
    x.token = u.first_token + token_at<S>(r);
    x.visible = x.wanted = is_wanted(p, u, x.token);
    if (S::kPackedV && !x.visible) {  // a chunk of V is read whole; its invisible tokens are zeroed afterwards
      constexpr int kChunk = 16 / S::kBytes;
      const int chunk = x.token / kChunk * kChunk, first = max(chunk, u.first_key);
      x.wanted = first < chunk + kChunk && is_wanted(p, u, first);
    }
    if (x.wanted) x.page = load_page(p, u.sequence, x.token);
    return x;
  }

  __device__ void end_lookup(const Lookup& x, TileSlot& slot, int kv_head) const {
    if (member >= kTile && member >= 32) return;
    end_lookup_of(x, slot, kv_head, member);
  }

  // Of the token at place r; the lanes of a warp have 32 neighbours.
  __device__ void end_lookup_of(const Lookup& x, TileSlot& slot, int kv_head, int r) const {
    const int64_t id = x.page.id(p);
    const bool ok = x.wanted && id >= 0 && id < p.a.num_blocks;
    if (x.wanted && !ok) p.bad_block(id, p.a.num_blocks);
    const uint32_t valid = __ballot_sync(~0u, ok && x.visible);
    if (r >= kTile) return;
    TokenPointers at{nullptr, nullptr};
    if (ok && S::kNvfp4) {  // of the page
      at.key = static_cast<const char*>(p.a.key.data) + id * copies.key_block;
      at.value = static_cast<const char*>(p.a.value.data) + id * copies.value_block;
    } else if (ok) {
      const int o = p.block_size.remainder(x.token);
      const char* key = static_cast<const char*>(p.a.key.data);
      const char* value = static_cast<const char*>(p.a.value.data);
      if (x.visible) at.key = key + id * copies.key_block + o * copies.key_token + kv_head * copies.key_head;
      at.value = value + id * copies.value_block + o * copies.value_token + kv_head * copies.value_head;
    }
    slot.tokens[r] = at;
    if (lane == 0) slot.valid[r / 32] = valid;
  }

  using Valid = uint32_t[kTile < 32 ? 1 : kTile / 32];  // a bit for each place of a tile

  static __device__ bool is_whole(const Valid& valid) {
    constexpr uint32_t kAll = kTile < 32 ? (1u << kTile % 32) - 1 : ~0u;
    bool whole = true;
    for (const uint32_t bits : valid) whole = whole && bits == kAll;
    return whole;
  }

  // ---- copies into a stage ------------------------------------------------------------------------------------------

  static constexpr int kChunks = S::kRowBytes / 16;        // of a token's row
  static constexpr int kCopies = kTile * kChunks / kTeam;  // by each thread, for K as for V

  // Tiles of rows.
  static __device__ int row_place(int row, int chunk) {
    // For products of four warps: columns of 128 bytes, which are swizzled as rows of that length.
    if constexpr (S::kWarpgroup) return chunk / 8 * kTile * 128 + swizzled<128>(row, chunk % 8);
    return swizzled<S::kRowBytes>(row, chunk);
  }

  // Packed tiles: K as [chunk][token], V as [group of chunks][dimension][chunk of the group].  Eight neighbouring lanes copy a
  // line of the cache to a line of the tile; if either were two, the copy would be.  Within lines places are swizzled, for
  // ldmatrix reads eight permuted tokens, or eight dimensions of a chunk, at once.
  static __device__ int key_place(int row, int chunk) {
    if constexpr (!S::kPackedV) return row_place(row, chunk);
    const int token = token_at<S>(row);
    return (chunk * kTile + (S::kPermutedTokens ? token ^ (token / 4 & 2) : token)) * 16;
  }

  static __device__ int packed_value_place(int d, int chunk, int shift) {
    const int mask = (1 << shift) - 1, x = ((chunk >> shift) * kD + d) << shift | (chunk & mask);
    return (x ^ (x >> 3 & mask)) * 16;
  }
  __device__ int packed_value_place(int d, int chunk) const {
    return packed_value_place(d, chunk, copies.value_chunk_shift);
  }

  // Copies 16 bytes from `row` + offset; nothing is read, and zeros written, if the row is null or the chunk past the head.
  template <bool kChecked>
  __device__ void copy(uint32_t to, const char* row, uint32_t offset, bool in_head) const {
    const bool read = !kChecked || (row != nullptr && in_head);
    const char* from = read ? row + offset : static_cast<const char*>(p.a.key.data);
    if constexpr (S::kReadOnce) {
      cp_async_16_once(to, from, read);
    } else {
      cp_async_16(to, from, read);
    }
  }

  // Pointers are fetched a few at a time, ahead of the copies that use them.
  static constexpr int kBatch = kCopies < 4 ? kCopies : 4;

  // Neighbouring threads take neighbouring chunks of a token.
  template <bool kChecked, bool kKeys, bool kValues>
  __device__ void load_token_rows(uint32_t stage, const TileSlot& slot) const {
    const int chunk = member % kChunks, r0 = member / kChunks;
    const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll(kChecked ? 1 : kCopies / kBatch)
    for (int batch = 0; batch < kCopies; batch += kBatch) {
      TokenPointers at[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) at[i] = slot.tokens[r0 + (batch + i) * (kTeam / kChunks)];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = r0 + (batch + i) * (kTeam / kChunks);
        if (kKeys) copy<kChecked>(stage + key_place(r, chunk), at[i].key, chunk * 16, in_head);
        if (kValues) {
          copy<kChecked>(stage + S::kTileBytes + row_place(r, chunk), at[i].value, chunk * 16, in_head);
        }
      }
    }
  }

  // Packed K: neighbouring threads take neighbouring tokens at one chunk index.
  template <bool kChecked>
  __device__ void load_packed_keys(uint32_t stage, const TileSlot& slot) const {
    const int r = place_of<S>(member % kTile), chunk0 = member / kTile;
    const char* row = slot.tokens[r].key;
#pragma unroll(kChecked ? 1 : kCopies)
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = chunk0 + i * (kTeam / kTile);
      copy<kChecked>(stage + key_place(r, chunk), row, chunk * copies.key_chunk, chunk * 16 < copies.head_bytes);
    }
  }

  // Packed V: order within a page: its chunks of one dimension, then the next dimension.
  template <bool kChecked>
  __device__ void load_packed_values(uint32_t stage, const TileSlot& slot) const {
    const int shift = copies.value_chunk_shift, low = member & ((1 << shift) - 1);
    const auto position = [&](int i, int& d, int& chunk) {
      const int x = (member + i * kTeam) >> shift;
      d = x % kD;
      chunk = low + (x / kD << shift);
    };
#pragma unroll(kChecked ? 1 : kCopies / kBatch)
    for (int batch = 0; batch < kCopies; batch += kBatch) {
      const char* at[kBatch];
      int d, chunk;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        position(batch + i, d, chunk);
        at[i] = slot.tokens[chunk * (16 / S::kBytes)].value;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        position(batch + i, d, chunk);
        copy<kChecked>(stage + S::kTileBytes + packed_value_place(d, chunk), at[i], d * copies.value_dim,
                       d < p.a.head_size);
      }
    }
  }

  template <bool kChecked>
  __device__ void load_checked(uint32_t stage, const TileSlot& slot) const {
    if constexpr (S::kPackedV) {
      load_packed_values<kChecked>(stage, slot);
      if (copies.key_token_fast) {
        load_packed_keys<kChecked>(stage, slot);
      } else {
        load_token_rows<kChecked, true, false>(stage, slot);
      }
    } else if (!copies.key_token_fast) {
      load_token_rows<kChecked, true, true>(stage, slot);
    } else {
      load_packed_keys<kChecked>(stage, slot);
      load_token_rows<kChecked, false, true>(stage, slot);
    }
  }

  // Sixteen bytes of codes with their two scales.
  struct Codes {
    uint4 codes{0, 0, 0, 0};
    uint8_t scales[2] = {0, 0};

    __device__ void read(const char* at, const Nvfp4Page& page, int token, int head, int piece) {
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(at);
      codes = *reinterpret_cast<const uint4*>(bytes + page.codes_at(token, head, piece * 32));
      for (int i = 0; i < 2; ++i) scales[i] = bytes[page.scale_at(token, head, piece * 2 + i)];
    }

    // address_of(i): where the i-th eight of the 32 halves go
    __device__ void store(auto&& address_of) const {
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        half2 values[4];
        nvfp4x8_to_half2x4(words[i], scales[i / 2], values);
        const auto* bits = reinterpret_cast<const uint32_t*>(values);
        store_shared(address_of(i), {bits[0], bits[1], bits[2], bits[3]});
      }
    }
  };

  __device__ void load_nvfp4(uint32_t stage, const TileSlot& slot) const {
    constexpr int kPieces = kD / 32, kLoads = kTile * kPieces / kTeam;  // by each thread, for K as for V
    constexpr int kAtOnce = kLoads < 2 ? kLoads : 2;
#pragma unroll 1
    for (int batch = 0; batch < kLoads; batch += kAtOnce) {
      Codes keys[kAtOnce], values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int x = member + (batch + i) * kTeam, r = x / kPieces, piece = x % kPieces;
        const TokenPointers at = slot.tokens[r];
        if (at.key == nullptr || piece * 32 >= p.a.head_size) continue;
        const int token = p.block_size.remainder(slot.unit.first_token + r);
        keys[i].read(at.key, p.a.key_page, token, slot.unit.kv_head, piece);
        values[i].read(at.value, p.a.value_page, token, slot.unit.kv_head, piece);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int x = member + (batch + i) * kTeam, r = x / kPieces, chunk = x % kPieces * 4;
        keys[i].store([&](int c) { return stage + key_place(r, chunk + c); });
        values[i].store([&](int c) { return stage + S::kTileBytes + swizzled<S::kRowBytes>(r, chunk + c); });
      }
    }
  }

  __device__ void load_stage(uint32_t stage, const TileSlot& slot) const {
    if constexpr (S::kNvfp4) {
      load_nvfp4(stage, slot);
    } else if (is_whole(slot.valid) && copies.head_bytes == S::kRowBytes) {
      load_checked<false>(stage, slot);
    } else {
      load_checked<true>(stage, slot);
    }
  }

  // Packed V: what lies past the end of a sequence may be NaN, and 0 * NaN is not 0.
  __device__ void clear_invisible(char* value_stage, const Valid& valid) const {
    constexpr int kChunk = 16 / S::kBytes;
#pragma unroll 1
    for (int r = 0; r < kTile; ++r) {
      if (valid[r / 32] >> r % 32 & 1) continue;
      const int t = token_at<S>(r);
      for (int d = member; d < kD; d += kTeam) {
        char* at = value_stage + packed_value_place(d, t / kChunk) + t % kChunk * S::kBytes;
        if constexpr (S::kNarrow) {
          *at = 0;
        } else {
          *reinterpret_cast<uint16_t*>(at) = 0;
        }
      }
    }
  }
};

// The host's side of it.
template <class S>
CacheCopies cache_copies(const PagedAttentionArgs& a) {
  constexpr int kBytes = S::kBytes;
  const KeyCacheView& k = a.key;
  CacheCopies copies{};
  if (S::kNvfp4) {  // these views are in bytes
    copies.key_block = k.block;
    copies.value_block = a.value.block;
    return copies;
  }
  copies.key_block = k.block * kBytes;
  copies.key_token = k.token * kBytes;
  copies.key_head = k.head * kBytes;
  copies.value_block = a.value.block * kBytes;
  copies.value_token = a.value.token * kBytes;
  copies.value_head = a.value.head * kBytes;
  copies.head_bytes = a.head_size * kBytes;
  copies.key_token_fast = k.chunk < a.head_size;
  copies.key_chunk = static_cast<uint32_t>(k.chunk_stride * kBytes);
  copies.value_dim = static_cast<uint32_t>(a.value.dim * kBytes);
  constexpr int kChunk = 16 / kBytes;
  const int page_chunks = a.block_size / kChunk;
  while (S::kPackedV && page_chunks % (2 << copies.value_chunk_shift) == 0 &&
         2 << copies.value_chunk_shift <= S::kTile / kChunk) {
    ++copies.value_chunk_shift;
  }
  if constexpr (S::kPackedV) {
    copies.part_tokens = copies.key_token != 16         ? 0
                         : a.block_size % S::kTile == 0 ? S::kTile
                         : a.block_size % 16 == 0       ? 16
                                                        : 0;
  }
  return copies;
}

// ... where S may take two KV heads as one.
template <class S>
CacheCopies copies_of(const Problem& p) {
  CacheCopies copies = cache_copies<S>(p.a);
  if (S::kFolded) copies.head_bytes *= 2;
  return copies;
}

}  // namespace pykv::attention
