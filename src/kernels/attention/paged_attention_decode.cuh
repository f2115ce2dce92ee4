// Decoding proper: one query token for each sequence, which sees all its keys, at most 16 query heads for a KV head, and
// pages of a multiple of eight tokens.
//
// What paged_attention_mma.cuh does for any batch, in the fewest steps from the start of the kernel to the first copy: a
// warp finds its place from the lengths by itself, walks on in registers, and starts the copies of a tile before it waits
// for the one it works on next.
//
// Floor: KV bytes / bandwidth + the chain length -> page -> tile.
#pragma once

#include "attention/paged_attention_chunks.cuh"
#include "cuda/dependent.cuh"

namespace pykv::attention {

constexpr int kGroupTokens = 8;  // looked up and addressed as one

// kQueries: 8 or 16, the heads of a group at most.  kForAnyBatch: with batch_invariant.
template <class Element, int kD, bool kPackedV, int kQueries, bool kForAnyBatch>
struct DecodeShape : Shape<Element, kD, kPackedV, RowClass::kFew> {
  using Few = Shape<Element, kD, kPackedV, RowClass::kFew>;
  static constexpr bool kInvariant = kForAnyBatch;
  static constexpr int kWarps = 4, kColumns = kQueries;
  static constexpr int kBlocksPerSm = kD == 64                                       ? 4
                                      : kD == 256                                    ? 1
                                      : kQueries == 16 && (Few::kNarrow || kPackedV) ? 2
                                                                                     : 3;
  static constexpr bool kRaw = Few::kNvfp4;
  static constexpr int kHalvesBytes = kRaw ? Few::kStageBytes : 0;
  static constexpr int kStageBytes = kRaw ? nvfp4_bytes(2 * Few::kTile * kD) : Few::kStageBytes;
  static constexpr int kStages = kRaw ? 4 : kBlocksPerSm > 2 ? 2 : 3;
  static constexpr int kRingBytes = kHalvesBytes + kStages * kStageBytes;
};

// A warp's tile, from its copies to its arithmetic.
struct alignas(16) TilePart {
  int sequence, len, kv_head, first_token;
  int slot;
  uint32_t valid;
  bool exists, begins, ends;
  bool ends_chunk;  // with batch_invariant
};

// From the block table to a stage.
template <class S>
struct DecodeLoader : ColumnsOf<S> {
  using Columns = ColumnsOf<S>;
  using Columns::copies;
  using Columns::lane;
  using Columns::p;
  using Columns::warp;
  static constexpr int kD = S::kD, kTile = S::kTile, kGroups = kTile / kGroupTokens;

  __device__ int length(int s) const { return static_cast<int>(clamp(p.a.seq_lens[s], 0, p.a.max_seq_len)); }

  struct Pages {
    int id[kGroups];  // of eight tokens each; -1: no id of any cache
  };

  // kEarly: before the kernel before has ended.
  template <bool kEarly = false>
  __device__ int look_up(int sequence, int token) const {
    const int* words = static_cast<const int*>(p.a.block_tables.data);
    const int64_t at = sequence * p.a.block_table_stride + p.block_size.quotient(token) * p.a.block_tables.stride;
    const bool two = p.a.block_tables.is_int64;  // both are asked for at once
    const auto word = [&](int64_t i) { return kEarly ? __ldcg(words + i) : words[i]; };
    const int low = word(two ? 2 * at : at), high = two ? word(2 * at + 1) : 0;
    return high == 0 ? low : -1;
  }

  // A guess: what the length is before the kernel before has ended.
  __device__ int early_length(int s) const {
    return __ldcg(static_cast<const int*>(p.a.seq_lens.data) +
                  s * p.a.seq_lens.stride * (p.a.seq_lens.is_int64 ? 2 : 1));
  }

  __device__ const char* key_row(int64_t id, int token, int kv_head) const {
    return static_cast<const char*>(p.a.key.data) + id * copies.key_block +
           p.block_size.remainder(token) * copies.key_token + kv_head * copies.key_head;
  }
  __device__ const char* value_row(int64_t id, int token, int kv_head) const {
    return static_cast<const char*>(p.a.value.data) + id * copies.value_block +
           p.block_size.remainder(token) * copies.value_token + kv_head * copies.value_head;
  }

  __device__ __noinline__ void report_page(int sequence, int token) const {
    p.bad_block(load_page(p, sequence, token).id(p), p.a.num_blocks);
  }

  // Bits of the tile's places with a key.
  __device__ uint32_t valid_places(const TilePart& part, const Pages& pages) const {
    const int token = token_at<S::kPermutedTokens>(lane);
    bool ok = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool good = static_cast<uint32_t>(pages.id[g]) < static_cast<uint32_t>(p.a.num_blocks);
      const int first = part.first_token + g * kGroupTokens;
      if (!good && first < part.len) [[unlikely]]
        report_page(part.sequence, first);
      if (token / kGroupTokens == g) ok = good;
    }
    return __ballot_sync(~0u, ok && lane < kTile && part.first_token + token < part.len);
  }

  // Starts the copies of a tile.
  __device__ void load(uint32_t stage, const TilePart& part, const Pages& pages) const {
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
    const auto copy = [&](uint32_t to, const char* from, bool read) {
      cp_async_16_once(to, read ? from : static_cast<const char*>(p.a.key.data), read);
    };
    constexpr int kChunks = Columns::kChunks, kCopies = Columns::kCopies;
    if constexpr (!S::kPackedV) {  // neighbouring lanes take neighbouring chunks of a token
      constexpr int kRows = 32 / kChunks;
      const int chunk = lane % kChunks, r0 = lane / kChunks;
      const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int r = r0 + i * kRows, g = i * kRows / kGroupTokens, in_group = r0 + i * kRows % kGroupTokens;
        const bool read = in_head && (part.valid >> r & 1);
        copy(stage + this->key_place(r, chunk), key[g] + in_group * copies.key_token + chunk * 16, read);
        copy(stage + S::kTileBytes + swizzled<S::kRowBytes>(r, chunk),
             value[g] + in_group * copies.value_token + chunk * 16, read);
      }
    } else {
      const auto of_group = [](const char* const(&from)[kGroups], int group) {
        const char* x = from[0];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) x = group == g ? from[g] : x;
        return x;
      };
      const int r = lane % kTile, token = token_at<S::kPermutedTokens>(r);
      const char* row = of_group(key, token / kGroupTokens) + token % kGroupTokens * copies.key_token;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int chunk = lane / kTile + i * (32 / kTile);
        copy(stage + this->key_place(r, chunk), row + chunk * copies.key_chunk,
             chunk * 16 < copies.head_bytes && (part.valid >> r & 1));
      }
      constexpr int kChunk = 16 / S::kBytes;
      const int shift = copies.value_chunk_shift;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int x = (lane + i * 32) >> shift, d = x % kD, c = (lane & ((1 << shift) - 1)) + (x / kD << shift);
        copy(stage + S::kTileBytes + this->packed_value_place(d, c),
             of_group(value, c * kChunk / kGroupTokens) + d * copies.value_dim,
             d < p.a.head_size && (part.valid >> c * kChunk & 1));
      }
    }
  }

  // The same where all is there: whole rows of tokens, a page's id for each eight of them.
  __device__ void load_whole(uint32_t stage, int kv_head, int first_token, const Pages& pages) const {
    constexpr int kChunks = Columns::kChunks, kRows = 32 / kChunks;  // rows of a step of the warp
    const int chunk = lane % kChunks, r0 = lane / kChunks;
    const auto times = [](int64_t stride, int n) {  // both fit in 32 bits
      return static_cast<uint64_t>(static_cast<uint32_t>(stride)) * static_cast<uint32_t>(n);
    };
    const char* key = static_cast<const char*>(p.a.key.data) + times(copies.key_head, kv_head) +
                      times(copies.key_token, r0) + chunk * 16;
    const char* value = static_cast<const char*>(p.a.value.data) + times(copies.value_head, kv_head) +
                        times(copies.value_token, r0) + chunk * 16;
    const uint64_t key_step = kRows * copies.key_token, value_step = kRows * copies.value_token;
    int o = p.block_size.remainder(first_token);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const char* k = key + times(copies.key_block, pages.id[g]) + times(copies.key_token, o);
      const char* v = value + times(copies.value_block, pages.id[g]) + times(copies.value_token, o);
#pragma unroll
      for (int i = 0; i < kGroupTokens / kRows; ++i) {
        const int at = swizzled<S::kRowBytes>(r0 + g * kGroupTokens + i * kRows, chunk);
        cp_async_16_once(stage + at, k + i * key_step);
        cp_async_16_once(stage + S::kTileBytes + at, v + i * value_step);
      }
      o = o + kGroupTokens == p.a.block_size ? 0 : o + kGroupTokens;
    }
  }

  // nvfp4: the codes of a tile's keys, their scales, and the same of its values.
  static constexpr int kCodeBytes = kTile * kD / 2, kRawBytes = S::kStageBytes / 2;

  __device__ void load_codes(uint32_t stage, const TilePart& part, const Pages& pages) const {
    const char* nowhere = static_cast<const char*>(p.a.key.data);
    // The page of a place in the tile, and the token there.
    const auto find = [&](int r, int64_t& id, int& token) {
      id = pages.id[0];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) id = r / kGroupTokens == g ? pages.id[g] : id;
      token = p.block_size.remainder(part.first_token + r / kGroupTokens * kGroupTokens) + r % kGroupTokens;
    };
    constexpr int kPieces = kD / 32;  // of 16 bytes in a token's codes
#pragma unroll
    for (int i = 0; i < kTile * kPieces / 32; ++i) {
      const int x = lane + i * 32, r = x / kPieces, element = x % kPieces * 32;
      int64_t id;
      int token;
      find(r, id, token);
      const bool read = part.valid >> r & 1 && element < p.a.head_size;
      const char* key = nowhere + id * copies.key_block + p.a.key_page.codes_at(token, part.kv_head, element);
      const char* value = static_cast<const char*>(p.a.value.data) + id * copies.value_block +
                          p.a.value_page.codes_at(token, part.kv_head, element);
      cp_async_16_once(stage + x * 16, read ? key : nowhere, read);
      cp_async_16_once(stage + kRawBytes + x * 16, read ? value : nowhere, read);
    }
    constexpr int kWords =
        kD / 64;  // in a row of scales; there are as many rows as tokens, four of them for four tokens
#pragma unroll
    for (int i = 0; i < (kTile * kWords + 31) / 32; ++i) {
      const int x = lane + i * 32, row = x / kWords, word = x % kWords;
      if (row >= kTile) break;
      int64_t id;
      int token;
      find(row, id, token);
      const bool read = (part.valid >> row / 4 * 4 & 15) != 0 && word < p.a.key_page.quarter;
      const auto scales = [&](const Nvfp4Page& page) {
        return page.scales + token * page.scales_token + part.kv_head * page.scales_head + word * 4;
      };
      const char* key = nowhere + id * copies.key_block + scales(p.a.key_page);
      const char* value = static_cast<const char*>(p.a.value.data) + id * copies.value_block + scales(p.a.value_page);
      cp_async_4(stage + kCodeBytes + x * 4, read ? key : nowhere, read);
      cp_async_4(stage + kRawBytes + kCodeBytes + x * 4, read ? value : nowhere, read);
    }
  }

  // From there to halves; zeros for what is no key, whatever its scale is.
  __device__ void widen_codes(const char* stage, uint32_t halves, uint32_t valid) const {
    constexpr int kPieces = kD / 32;
    const int quarter = p.a.key_page.quarter;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const char* raw = stage + part * kRawBytes;
#pragma unroll
      for (int i = 0; i < kTile * kPieces / 32; ++i) {
        const int x = lane + i * 32, r = x / kPieces, piece = x % kPieces;
        typename Columns::Codes codes;
        if (valid >> r & 1 && piece * 32 < p.a.head_size) {
          codes.codes = *reinterpret_cast<const uint4*>(raw + x * 16);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int s = piece * 2 + j, row = (s >= quarter) + (s >= 2 * quarter) + (s >= 3 * quarter);
            codes.scales[j] = raw[kCodeBytes + (r / 4 * 4 + row) * (kD / 16) + (s - row * quarter) * 4 + r % 4];
          }
        }
        codes.store([&](int c) { return halves + part * S::kTileBytes + this->row_place(r, piece * 4 + c); });
      }
    }
  }

  // Starts the copies of a tile; returns the bits of its places with a key.
  __device__ uint32_t start(uint32_t stage, TilePart& part, const Pages& pages) const {
    if constexpr (S::kRaw) {
      part.valid = valid_places(part, pages);
      if (part.valid != 0) load_codes(stage, part, pages);
      return part.valid;
    }
    bool whole = !S::kPackedV && part.first_token + kTile <= part.len && copies.head_bytes == S::kRowBytes;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      whole = whole && static_cast<uint32_t>(pages.id[g]) < static_cast<uint32_t>(p.a.num_blocks);
    }
    if constexpr (!S::kPackedV) {
      if (whole) {
        load_whole(stage, part.kv_head, part.first_token, pages);
        return kTile == 32 ? ~0u : (1u << kTile % 32) - 1;
      }
    }
    part.valid = valid_places(part, pages);
    if (part.valid != 0) load(stage, part, pages);
    return part.valid;
  }

  static constexpr int kAtOnce = 32 / kGroups;  // tiles whose pages the lanes look up together

  // From what look_up gave to the lanes, kGroups each, the pages of tile i.
  static __device__ Pages pages_of(int ids, int i) {
    Pages pages;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pages.id[g] = __shfl_sync(~0u, ids, i * kGroups + g);
    return pages;
  }

  // A tile that has arrived, at `stage` of a ring.
  __device__ void attend(char* ring, int offset, const TilePart& part, typename Columns::State& state) const {
    if (part.valid == 0) return;
    char* stage = ring + S::kHalvesBytes + offset;
    if constexpr (S::kRaw) {
      widen_codes(stage, shared_address(ring), part.valid);
      __syncwarp();
      stage = ring;
    }
    if constexpr (S::kPackedV) {
      const typename Columns::Valid valid = {part.valid};
      if (!this->is_whole(valid)) {
        this->clear_invisible(stage + S::kTileBytes, valid);
        __syncwarp();
      }
    }
    this->compute(shared_address(stage), part.valid, part.kv_head, part.first_token, part.len, state);
  }
};

// Blocks share the line of paged_attention_plan.cuh.
template <class S>
struct DecodeKernel : DecodeLoader<S> {
  using Base = DecodeLoader<S>;
  using Base::copies;
  using Base::lane;
  using Base::length;
  using Base::p;
  using Base::warp;
  using typename Base::State;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages, kGroups = Base::kGroups;
  static constexpr int kUnitTokens = S::kUnitTokens;

  TilePart* parts;  // of the warp's stages
  char* rings;      // all warps' stages
  ColumnStats<S>& stats;
  float* chunk_left;  // with batch_invariant

  // ---- the walk -----------------------------------------------------------------------------------------------------

  // Where a warp is; all its lanes hold the same.
  struct Walk {
    int sequence, len, kv_head, tile;
    int units;  // of this segment in this share, from `tile` on
    int left;   // places of the share after the segment
    int slot;
    bool exists, begins;
  };

  // Of one KV head on the line: its tiles and one more or, with batch_invariant, its chunks.
  static constexpr int kPlaceTokens = S::kInvariant ? kChunkTokens : kUnitTokens,
                       kPlaceUnits = kPlaceTokens / kUnitTokens;
  static constexpr int kLead = S::kInvariant ? 0 : 1;
  static __device__ int places(int len) { return kLead + max(1, (len + kPlaceTokens - 1) / kPlaceTokens); }

  // 128 sequences, four to a lane, and the places before each.
  struct Scan {
    int len[4], before[4], total;
  };

  __device__ Scan scan(int base) const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    Scan x;
    x.total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int s = base + j * 32 + lane;
      x.len[j] = s < num_seqs ? length(s) : -1;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (base + j * 32 >= num_seqs) break;
      const int own = x.len[j] < 0 ? 0 : places(x.len[j]) * p.a.num_kv_heads;
      int upto = own;
#pragma unroll 1
      for (int delta = 1; delta < 32; delta *= 2) {
        const int below = __shfl_up_sync(~0u, upto, delta);
        if (lane >= delta) upto += below;
      }
      x.before[j] = x.total + upto - own;
      x.total += __shfl_sync(~0u, upto, 31);
    }
    return x;
  }

  __device__ Walk start_line() const {
    const int num_seqs = static_cast<int>(p.a.num_seqs), block = blockIdx.x;
    Scan x = scan(0);
    int total = x.total;
#pragma unroll 1
    for (int base = 128; base < num_seqs; base += 128) total += scan(base).total;
    const int each = p.by_grid.quotient(total), longer = total - each * gridDim.x;
    const int begin = block * each + min(block, longer);
    Unfinished note{-1, false, 0, 0, 0, 0, 0};
    Walk w{};
    w.left = each + (block < longer);
    if (w.left > 0) {
      int before = 0;
#pragma unroll 1
      for (int base = 0; begin >= before + x.total;) {
        before += x.total;
        x = scan(base += 128);
        w.sequence = base;
      }
      int place = 0, all = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (w.sequence + j * 32 >= num_seqs || all > 0) break;
        const int at = begin - before - x.before[j], own = x.len[j] < 0 ? 0 : places(x.len[j]);
        const uint32_t hit = __ballot_sync(~0u, at >= 0 && at < own * p.a.num_kv_heads);
        if (hit == 0) continue;
        const int from = __ffs(hit) - 1;
        w.sequence += j * 32 + from;
        w.len = __shfl_sync(~0u, x.len[j], from);
        place = __shfl_sync(~0u, at, from);
        all = places(w.len);
      }
      w.kv_head = static_cast<uint32_t>(place) / static_cast<uint32_t>(all);
      place -= w.kv_head * all;
      if (enter_segment(w, place, 2 * block) && place > kLead) {
        const int first_unit = begin - place + kLead, in_longer = longer * (each + 1);
        const int first = first_unit < in_longer ? first_unit / (each + 1) : longer + (first_unit - in_longer) / each;
        note = {first, first * each + min(first, longer) >= first_unit - kLead, w.sequence, 1, w.kv_head, 0, 0};
      }
    }
    if (threadIdx.x == 0) p.unfinished[block] = note;
    return w;
  }

  // From this place of the segment on.  Is its end in this share?
  static __device__ bool enter_segment(Walk& w, int place, int slot) {
    w.tile = max(place - kLead, 0) * kPlaceUnits;
    const int all = places(w.len), here = min(w.left, all - place);
    w.left -= here;
    w.units = (place < kLead ? here - kLead : here) * kPlaceUnits;
    const bool finishes = place + here == all;
    w.slot = w.tile == 0 && finishes ? -1 : slot;
    w.exists = w.units > 0;
    w.begins = true;
    return finishes;
  }

  __device__ void step(Walk& w) const {
    w.begins = false;
    ++w.tile;
    if (--w.units > 0) return;
    w.exists = false;
    if (w.left <= kLead) return;  // no tile of the next segment is this block's
    if (++w.kv_head == p.a.num_kv_heads) {
      w.kv_head = 0;
      w.len = length(++w.sequence);
    }
    enter_segment(w, 0, 2 * blockIdx.x + 1);
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  // Of this warp's tile in a unit.
  __device__ int first_token(int unit) const {
    if constexpr (S::kInvariant) {
      static_assert(kPlaceUnits == Base::kPartTiles);
      return this->token_in_chunk(unit / kPlaceUnits, unit % kPlaceUnits);
    }
    return unit * kUnitTokens + warp * kTile;
  }

  // For this tile and the next ones of the segment.
  __device__ int look_up_tiles(const Walk& w) const {
    const int token = first_token(w.tile + lane / kGroups) + lane % kGroups * kGroupTokens;
    return token < w.len ? this->look_up(w.sequence, token) : -1;
  }

  // Starts the way of the queries from memory, so that the beginning of a segment finds them near.
  __device__ void prefetch_queries(const TilePart& part) const {
    constexpr int kLines = kD <= 64 ? 1 : kD / 64;  // of 128 bytes
    const int column = lane / kLines;
    if (lane < S::kColumns * kLines && column < p.group && lane % kLines * 64 < p.a.head_size) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(
          static_cast<const uint16_t*>(p.a.query) + part.sequence * p.a.query_token_stride +
          this->query_head(part.kv_head, column) * p.a.query_head_stride + lane % kLines * 64));
    }
  }

  // The four warps add up through the stages that they are done with.
  __device__ void end_segment(const TilePart& part, const State& state, int stage_offset) const {
    static_assert((S::kRaw ? S::kHalvesBytes : S::kStageBytes) >= Base::kLeftBytes);
    float* left = reinterpret_cast<float*>(rings + stage_offset);
    constexpr int kRing = S::kRingBytes / 4;
    __syncwarp();  // all lanes have read what lay there
    this->leave(state, left + warp * kRing, stats.of[warp]);
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < p.group * (kD / 4); x += kThreads) {
      const int column = x / (kD / 4), d = x % (kD / 4) * 4;
      float top = -INFINITY;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) top = fmaxf(top, stats.of[w][column].x);
      PartSum sum;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) {
        sum.add(stats.of[w][column], *reinterpret_cast<const float4*>(left + w * kRing + this->place(column, d)), top);
      }
      if (part.slot >= 0) {
        const int64_t at = static_cast<int64_t>(part.slot) * p.rows + column;
        if (d == 0) p.partial_stats[at] = {top, sum.sum};
        *reinterpret_cast<float4*>(p.partial + at * p.pitch + d) = sum.o;
      } else {
        const Row row = this->row_of_column(part.sequence, part.len, part.kv_head, column);
        const float f = finish_row(p, row, part.kv_head, top, sum.sum);
        store_output<S>(p, row, d, {sum.o.x * f, sum.o.y * f, sum.o.z * f, sum.o.w * f});
      }
    }
    __syncthreads();  // the stages are free again
  }

  // The same with batch_invariant; `part`: the last tile of a chunk.
  __device__ void end_chunk(const TilePart& part, State& state, auto& near, auto& far) const {
    Base::end_chunk(state, chunk_left, stats.of, near, far);
    if (!part.ends) return;
    this->for_each_kept(
        near, far, [](int) {},
        [&](ExactQuad& kept, int column, int d) {
          if (part.slot >= 0) {
            ExactQuad::at(p, part.slot, column, d / 4) = kept;
          } else {
            const Row row = this->row_of_column(part.sequence, part.len, part.kv_head, column);
            store_output<S>(p, row, d, kept.finish(p, row, part.kv_head));
          }
        });
    Base::clear_kept(near, far);
  }

  __device__ void run() {
    if constexpr (S::kInvariant) {
      typename Base::Near near;
      typename Base::Far far;
      Base::clear_kept(near, far);
      run_with([&](const TilePart& part, State& state) { end_chunk(part, state, near, far); });
    } else {
      run_with([](const TilePart&, State&) {});
    }
  }

  __device__ void run_with(auto&& end_chunk) {
    wait_for_previous_kernel();
    State state;
    [[maybe_unused]] TilePart last{};  // if its chunk is over and was not added up yet
    Walk w = start_line();
    int ids = -1, looked_up = w.tile;  // the pages of tiles from `looked_up` on
    if (w.exists) ids = look_up_tiles(w);

    // In iteration i the copies of tile i + stages - 1 start and the pages of the next are looked up.
    int at = 0, free = 0;  // the stages of tiles i and i + stages - 1
    const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
    const uint32_t stage0 = shared_address(rings + warp * S::kRingBytes) + S::kHalvesBytes;
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      TilePart next{w.sequence, w.len, w.kv_head, first_token(w.tile), w.slot, 0, w.exists, w.begins, w.units == 1};
      next.ends_chunk = S::kInvariant && (w.tile + 1) % kPlaceUnits == 0;
      if (w.exists) {
        next.valid = this->start(stage0 + free * S::kStageBytes, next, Base::pages_of(ids, w.tile - looked_up));
        if (next.begins && i > 1 - kStages) prefetch_queries(next);
        step(w);
        if (w.exists && (w.begins || w.tile == looked_up + Base::kAtOnce)) {
          looked_up = w.tile;
          ids = look_up_tiles(w);
        }
      }
      cp_async_commit();
      if (lane == 0) parts[free] = next;
      free = after(free);
      if (i < 0) continue;
      __syncwarp();
      if constexpr (S::kInvariant) {
        if (last.ends_chunk) end_chunk(last, state);
        last.ends_chunk = false;
      }
      const TilePart part = parts[at];
      if (!part.exists) break;
      if (part.begins) {
        this->fetch_queries(part.sequence, part.kv_head, state);
        this->settle(part.kv_head, state);
      }
      cp_async_wait<kStages - 1>();
      __syncwarp();  // the tile is there
      const int offset = at * S::kStageBytes;
      this->attend(rings + warp * S::kRingBytes, offset, part, state);
      if constexpr (S::kInvariant) {
        if (part.ends_chunk) last = part;
      } else {
        if (part.ends) end_segment(part, state, S::kRaw ? 0 : offset);
      }
      __syncwarp();  // its stage is free
      at = after(at);
    }
    let_next_kernel_start();
    if (blockIdx.x == 0 && warp == 0) {
      for (int64_t s = lane; s < p.a.num_seqs; s += 32) report_sequence(p, load_sequence(p, s));
    }
  }
};

template <class S>
constexpr int decode_shared_bytes() {
  return S::kWarps * (S::kRingBytes + S::kStages * static_cast<int>(sizeof(TilePart))) +
         static_cast<int>(sizeof(ColumnStats<S>)) + (S::kInvariant ? ChunkColumns<S>::kLeftBytes : 0);
}

template <class S>
__global__ void __launch_bounds__(kThreads, S::kBlocksPerSm)
    paged_attention_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  auto* stats = reinterpret_cast<ColumnStats<S>*>(memory + S::kWarps * S::kRingBytes);
  auto* parts = reinterpret_cast<TilePart*>(stats + 1) + threadIdx.x / 32 * S::kStages;
  auto* left = reinterpret_cast<float*>(reinterpret_cast<TilePart*>(stats + 1) + S::kWarps * S::kStages);
  if constexpr (S::kInvariant) {
    DecodeKernel<S> kernel{{{{{p, copies}}}}, parts, memory, *stats, left};
    kernel.run();
  } else {
    DecodeKernel<S> kernel{{{{p, copies}}}, parts, memory, *stats, left};
    kernel.run();
  }
}

// Can it take this call, whatever the lengths?
template <class S>
bool suits_decode(const Problem& p) {
  const PagedAttentionArgs& a = p.a;
  const bool packed_keys = a.key.chunk < a.head_size;
  const int64_t most_places = (a.max_seq_len / S::kUnitTokens + 2) * a.num_kv_heads;
  const auto fits = [](int64_t elements) { return elements >= 0 && elements * S::kBytes < int64_t{1} << 32; };
  const bool strides = fits(a.key.block) && fits(a.key.token) && fits(a.key.head) && fits(a.value.block) &&
                       fits(a.value.token) && fits(a.value.head);
  return strides && a.cu_query_lens.data == nullptr && p.group <= S::kColumns && p.window == kNoWindow && !p.sparse &&
         a.block_size % kGroupTokens == 0 && packed_keys == S::kPackedV && a.num_blocks < (int64_t{1} << 31) &&
         a.num_seqs * most_places < (int64_t{1} << 31) && a.max_seq_len < kNoWindow - S::kUnitTokens * 64;
}

template <class S>
bool launch_decode_kernel(const Problem& p, const Launch& launch) {
  if (!suits_decode<S>(p)) return false;
  static PerDevice resident;
  return launch_line(paged_attention_decode_kernel<S>, decode_shared_bytes<S>(), S::kUnitTokens,
                     few_rows_tiling(p.a.head_size), cache_copies<S>(p.a), p, launch, resident);
}

}  // namespace pykv::attention
