// Prefill on Hopper: the warpgroup that brings data.
//
// A warp copies 32 rows, whose addresses go round by shuffles, by 16-byte pieces into lines of 128 bytes, swizzled as the
// matrix units want them; barriers in shared memory count the copies as they land, so that nobody else waits for them.
#pragma once

#include "attention/cuda/prefill/tiles.cuh"
#include "attention/cuda/tile_loader.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

template <class S>
struct PrefillFeeder {
  static constexpr int kD = S::kD;
  static constexpr int kTokens = S::kTile / 4;  // of a tile, whose pages a warp looks up

  const Problem& p;
  const CacheCopies& copies;
  const WholeTiles& whole;
  PrefillScratch& scratch;
  uint32_t queries, keys, values;  // shared memory
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // As many rows as a warp has of a tile, whose beginnings its lanes know: eight lanes for a line of a row.  Addresses come for
  // several rows before their copies begin, so that one wait for shuffles serves all of them.
  template <int kCount, bool kChecked>
  __device__ void copy_rows(uint32_t tile, const char* row) const {
    constexpr int kColumn = 4 * kCount * 128, kBatch = 4;
    static_assert(kCount % (4 * kBatch) == 0);
    const int chunk = lane % 8, r = lane / 8;
    const uint32_t to = tile + (warp * kCount + r) * 128 + (chunk ^ r) * 16;
    const auto bits = reinterpret_cast<unsigned long long>(row);
#pragma unroll
    for (int i = 0; i < kCount; i += 4 * kBatch) {
      const char* from[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        from[b] = reinterpret_cast<const char*>(__shfl_sync(~0u, bits, i + 4 * b + r));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t place = (to ^ (b % 2 * 64)) + (i + 4 * b) * 128;
#pragma unroll
        for (int c = 0; c < kD / 64; ++c) {
          const int at = c * 128 + chunk * 16;
          if (kChecked) {
            const bool read = from[b] != nullptr && at < copies.head_bytes;
            cp_async_16(place + c * kColumn, read ? from[b] + at : static_cast<const char*>(p.a.query), read);
          } else {
            cp_async_16(place + c * kColumn, from[b] + at);
          }
        }
      }
    }
  }

  __device__ void copy_tokens(uint32_t tile, const char* row, bool ok, bool all) const {
    if (all) {
      copy_rows<kTokens, false>(tile, row);
    } else {
      copy_rows<kTokens, true>(tile, ok ? row : nullptr);
    }
  }

  __device__ void wait_empty(uint64_t& empty, int parity) const {
    mbarrier_wait(shared_address(&empty), parity);
    __syncwarp();
  }

  __device__ void copy_queries(const Unit& u) const {
    const Row row = row_of(p, u, warp * 32 + lane);
    const auto* at =
        static_cast<const uint16_t*>(p.a.query) + row.token * p.a.query_token_stride + row.head * p.a.query_head_stride;
    copy_rows<32, true>(queries, row.valid ? reinterpret_cast<const char*>(at) : nullptr);
  }

  // The copies' arrival says nothing of what was written beside them: the segment and the valid tokens.
  __device__ void commit_keys(int stage) const {
    const uint32_t full = shared_address(&scratch.key_full[stage]);
    cp_async_arrive(full);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }

  struct Lookup {
    PageEntry page;
    int token;
    bool wanted;
  };

  // What look_up() asks of a segment for each of its tiles.
  const int* table;  // of its sequence
  int first_key, last_key, first_token;

  __device__ void begin_segment(const Unit& u) {
    table = place_in_table(p, words_before_page(p, u.sequence, 0)).words;
    first_key = u.first_key;
    last_key = min(u.last_key, u.sequence_len - 1);
    first_token = u.first_token + warp * kTokens + lane;
  }

  __device__ Lookup look_up(const Unit& u, int tile) const {
    Lookup x{{0, 0}, first_token + tile * S::kTile, false};
    x.wanted = lane < kTokens && x.token >= first_key && x.token <= last_key && (!p.sparse || is_wanted(p, u, x.token));
    if (x.wanted) {
      const int* entry = table + words_before(p.a.block_tables, p.block_size.quotient(x.token));
      x.page = {entry[0], p.a.block_tables.is_int64 ? entry[1] : 0};
    }
    return x;
  }

  // Of a mixed batch, where not every block has tiles, all entries are taken, and none is dealt out.
  __device__ int first_entry() const { return is_mixed() ? atomicAdd(&whole.counts->taken, 1) : blockIdx.x; }
  __device__ int dealt_entries() const { return is_mixed() ? 0 : gridDim.x; }
  __device__ bool is_mixed() const { return S::kMayBeMixed && p.mixed; }

  __device__ void feed(bool is_whole) {
    TileList list{p, whole};
    int entry = is_whole && threadIdx.x == 0 ? first_entry() : 0;  // of lane 0 of the first warp
    int stage = S::kStages - 1, parity = 0;                        // of the tile before
#pragma unroll 1
    for (int n = 0;; ++n) {
      PrefillSegment& segment = scratch.segments[n % 8];
      if (is_whole) {
        if (warp == 0) {
          const PrefillSegment found = list.get(__shfl_sync(~0u, entry, 0), lane);
          if (lane == 0) {
            segment = found;
            entry = dealt_entries() + atomicAdd(&whole.counts->taken, 1);  // arrives while the segment is fed
          }
        }
      } else if (threadIdx.x == 0) {
        Walker& walker = scratch.walker;
        segment.unit = walker.unit;
        segment.tiles = walker.unit.exists ? walker.in_segment : 0;
        if (walker.unit.exists) walker.next_segment(p);
      }
      named_barrier_sync(kFeedersBarrier, kThreads);
      const int tiles = segment.tiles, kv_head = segment.unit.kv_head;
      Lookup next;
      if (tiles > 0) {
        begin_segment(segment.unit);
        next = look_up(segment.unit, 0);
      }
#pragma unroll 1
      for (int j = 0; j < max(tiles, 1); ++j) {
        if (++stage == S::kStages) {
          stage = 0;
          parity ^= 1;
        }
        wait_empty(scratch.key_empty[stage], parity);
        if (tiles == 0) {  // the end
          commit_keys(stage);
          cp_async_wait<0>();
          return;
        }
        if (j == 0) {
          wait_empty(scratch.queries_read, n % 2 ^ 1);
          copy_queries(segment.unit);
        }
        const Lookup x = next;
        const int64_t id = x.page.id(p);
        const bool ok = x.wanted && id >= 0 && id < p.a.num_blocks;
        if (x.wanted && !ok) p.bad_block(id, p.a.num_blocks);
        // The causal mask of its row hides what no row wants.
        const uint32_t valid = __ballot_sync(~0u, ok || (p.a.causal && !x.wanted) || lane >= kTokens);
        if (lane == 0) scratch.valid[stage][warp] = valid;
        const int o = p.block_size.remainder(x.token);
        const char* key = static_cast<const char*>(p.a.key.data) + id * copies.key_block + o * copies.key_token +
                          kv_head * copies.key_head;
        const char* value = static_cast<const char*>(p.a.value.data) + id * copies.value_block +
                            o * copies.value_token + kv_head * copies.value_head;
        const bool all = __all_sync(~0u, ok || lane >= kTokens) && copies.head_bytes == kD * 2;
        copy_tokens(keys + stage * S::kTileBytes, key, ok, all);
        commit_keys(stage);
        if (j + 1 < tiles) next = look_up(segment.unit, j + 1);
        wait_empty(scratch.value_empty[stage], parity);
        copy_tokens(values + stage * S::kTileBytes, value, ok, all);
        cp_async_arrive(shared_address(&scratch.value_full[stage]));
      }
    }
  }

  __device__ void run() {
    bool has_tiles = true;
    int blocks = gridDim.x;  // that have tiles
    if (is_mixed()) {
      blocks = blocks_of_prefill(p, scratch.sums, scratch.longest);
      has_tiles = blockIdx.x < blocks;
    }
    const bool is_whole = has_tiles && (whole.always || prefers_whole(p, blocks, scratch.sums, scratch.longest));
    if (!has_tiles || is_whole) {
      if (threadIdx.x == 0) {
        scratch.walker.unit.exists = false;
        scratch.ends.clear();
      }
    } else {
      const SharePosition share = find_share<kFeedersBarrier>(p, scratch.plan, blocks);
      if (threadIdx.x == 0) scratch.walker.start(p, share, &scratch.ends);
    }
    give_registers<S::kFeederRegisters>();
    feed(is_whole);
  }
};

}  // namespace pykv::attention
