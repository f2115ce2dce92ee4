// Decoding proper: from the block table to a warp's stages.
//
// The lanes look up the pages of the warp's next tiles together, a page for each eight tokens; a tile that is all there then
// takes one multiplication for eight tokens and one addition for a copy.
#pragma once

#include "attention/paged_attention_chunks.cuh"
#include "cuda/dependent.cuh"

namespace pykv::attention {

constexpr int kGroupTokens = 8;  // looked up and addressed as one

// A stride of the cache, taken so often; both fit in 32 bits.
__device__ inline uint64_t times(int64_t stride, int n) {
  return static_cast<uint64_t>(static_cast<uint32_t>(stride)) * static_cast<uint32_t>(n);
}

// kQueries: 4, 8 or 16, the heads of a group at most.  kForAnyBatch: with batch_invariant.  kDeep: two blocks on an SM with
// three stages, not three with two.
template <class Element, int kD, bool kPackedV, int kQueries, bool kForAnyBatch, bool kDeep = false>
struct DecodeShape : Shape<Element, kD, kPackedV, RowClass::kFew> {
  using Few = Shape<Element, kD, kPackedV, RowClass::kFew>;
  static constexpr bool kInvariant = kForAnyBatch;
  // Two blocks of six warps leave fewer pieces than three of four.  Elements of one byte do best with a tile of each warp
  // under way, not two: the next one's copies start after the wait for its own.
  static constexpr bool kSixWarps = kD == 128 && kQueries <= 8 && !kForAnyBatch && !Few::kNvfp4;
  static constexpr bool kLate = Few::kNarrow && (kSixWarps || (kForAnyBatch && kD == 128 && kQueries == 8 && !kDeep));
  static constexpr bool kTwins = kQueries == 4;
  // KV heads of a segment, warp by warp: neighbours in memory are read together, and there are half as many ends.  The
  // block of twelve warps has the units of two blocks of six.
  static constexpr int kHeads = kTwins && kLate ? 2 : 1;
  static constexpr int kWarps = kSixWarps ? 6 * kHeads : 4, kColumns = kQueries;
  static constexpr int kUnitTokens = kWarps / kHeads * Few::kTile;
  static constexpr int kBlocksPerSm = kSixWarps                                                 ? 2 / kHeads
                                      : kD == 64                                                ? 4
                                      : kD == 256                                               ? 1
                                      : kDeep || (kQueries == 16 && (Few::kNarrow || kPackedV)) ? 2
                                                                                                : 3;
  static constexpr bool kRaw = Few::kNvfp4;
  static constexpr int kHalvesBytes = kRaw ? Few::kStageBytes : 0;
  static constexpr int kStageBytes = kRaw ? nvfp4_bytes(2 * Few::kTile * kD) : Few::kStageBytes;
  static constexpr int kStages = kRaw ? 4 : kSixWarps || kBlocksPerSm > 2 ? 2 : 3;
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

  // Where the table has a token's page, and the words of an entry.
  struct PlaceInTable {
    const int* words;
    int step;
  };
  __device__ PlaceInTable place_in_table(int sequence, int token) const {
    const int64_t at = sequence * p.a.block_table_stride + p.block_size.quotient(token) * p.a.block_tables.stride;
    const int step = p.a.block_tables.is_int64 ? 2 : 1;
    return {static_cast<const int*>(p.a.block_tables.data) + at * step, step};
  }

  // kEarly: before the kernel before has ended.
  template <bool kEarly = false>
  __device__ int look_up(int sequence, int token) const {
    const auto [words, step] = place_in_table(sequence, token);
    const auto word = [](const int* from) { return kEarly ? __ldcg(from) : *from; };
    const int low = word(words), high = step > 1 ? word(words + 1) : 0;  // both are asked for at once
    return high == 0 ? low : -1;
  }

  // A page's id as the table has it.  Nobody waits for it before id().
  struct PageWords {
    int low = -1, high = 0;

    __device__ int id() const { return high == 0 ? low : -1; }
  };

  // Asks for the page of a token, if it is wanted, else it is -1.  The words come where they stay: the compiler would move
  // them on at once, and so wait for them.
  __device__ PageWords ask_for_page(int sequence, int token, bool wanted) const {
    const auto [words, step] = place_in_table(sequence, token);
    PageWords page;
    const auto load = [](int& to, const int* from, bool wanted) {
      asm volatile("{.reg .pred wanted; setp.ne.s32 wanted, %2, 0; @wanted ld.global.b32 %0, [%1];}"
                   : "+r"(to)
                   : "l"(from), "r"(static_cast<int>(wanted)));
    };
    load(page.low, words, wanted);
    load(page.high, words + 1, wanted && step > 1);
    return page;
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

  // While the kernel before still runs, brings a tile into the L2, if these are the length and the place of its keys.
  // Whatever that kernel may yet write to the table is read again after it; nothing of this stays in the L1.
  __device__ void foresee(int sequence, int kv_head, int len, int first_token) const {
    if constexpr (!S::kPackedV && !S::kRaw) {
      const int token0 = first_token + lane % kGroups * kGroupTokens;
      const int page = token0 < p.a.max_seq_len ? look_up<true>(sequence, token0) : -1;
      constexpr int kLines = S::kRowBytes < 128 ? 1 : S::kRowBytes / 128;  // of the L2, in a row
#pragma unroll
      for (int i = 0; i < (kTile * kLines + 31) / 32; ++i) {
        const int x = i * 32 + lane, r = x / kLines, token = first_token + r, at = x % kLines * 128;
        const int id = __shfl_sync(~0u, page, r / kGroupTokens);
        if (r >= kTile || token >= len || at >= copies.head_bytes ||
            static_cast<uint32_t>(id) >= static_cast<uint32_t>(p.a.num_blocks)) {
          continue;
        }
        prefetch(key_row(id, token, kv_head) + at);
        prefetch(value_row(id, token, kv_head) + at);
      }
    }
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
      const int token = lane % kTile, r = place_of<S::kPermutedTokens>(token);
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

  // The same for packed pages of 16 tokens, or of a tile, where a head's keys are one piece, and so are its values.
  template <int kPage>
  __device__ void load_pages(uint32_t stage, int kv_head, const Pages& pages) const {
    constexpr int kPieceCopies = kPage * S::kRowBytes / 512,
                  kSideBySide = kPage * S::kBytes / 16;  // chunks of a dimension
    static_assert(kSideBySide == 1 || kSideBySide == 2);
    const char* key = static_cast<const char*>(p.a.key.data) + times(copies.key_head, kv_head) + lane * 16;
    const char* value = static_cast<const char*>(p.a.value.data) + times(copies.value_head, kv_head) + lane * 16;
    const uint32_t key_to = stage + this->key_place(place_of<S::kPermutedTokens>(lane % kPage), lane / kPage);
#pragma unroll
    for (int t = 0; t < kTile / kPage; ++t) {
      const int id = pages.id[t * kPage / kGroupTokens];
      const char* k = key + times(copies.key_block, id);
      const char* v = value + times(copies.value_block, id);
      const int d = lane / kSideBySide, chunk = t * kSideBySide + lane % kSideBySide;
      const uint32_t value_to = stage + S::kTileBytes + this->packed_value_place(d, chunk, kSideBySide / 2);
#pragma unroll
      for (int i = 0; i < kPieceCopies; ++i) {
        cp_async_16_once(key_to + (t * kPage + i * (32 / kPage) * kTile) * 16, k + i * 512);
        cp_async_16_once(value_to + i * 512, v + i * 512);
      }
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
    bool whole = part.first_token + kTile <= part.len &&
                 (S::kPackedV ? copies.whole_page > 0 : copies.head_bytes == S::kRowBytes);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      whole = whole && static_cast<uint32_t>(pages.id[g]) < static_cast<uint32_t>(p.a.num_blocks);
    }
    if (whole) {
      if constexpr (S::kPackedV) {
        if (kTile == 16 || copies.whole_page == 16) {
          load_pages<16>(stage, part.kv_head, pages);
        } else {
          load_pages<kTile>(stage, part.kv_head, pages);
        }
      } else {
        load_whole(stage, part.kv_head, part.first_token, pages);
      }
      return kTile == 32 ? ~0u : (1u << kTile % 32) - 1;
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

  // With twins (paged_attention_columns.cuh), when a segment is over: what is NaN or infinite in a value is in the sum of its
  // dimension and, times zero, in its neighbour's.  Such sums, which are rare, are made again from the warp's tiles, at
  // `first`, `first` + `step`, ... up to `last`, by way of a stage that is free.
  __device__ void separate_twins(uint32_t stage, TilePart part, int first, int step, int last,
                                 typename Columns::State& state) const {
    constexpr bool kFinite = std::is_same_v<typename S::Element, Element8<KvFormat::kInt8>>;  // all codes
    if constexpr (S::kTwins && !kFinite) {
      if (Columns::are_finite(state)) return;
      typename Columns::template Sums<false> o{};
      const float sums[2] = {state.sum[0][0], state.sum[0][1]};  // they are complete, and so is the maximum
#pragma unroll 1
      for (part.first_token = first; part.first_token <= last; part.first_token += step) {
        const int token = part.first_token + lane % kGroups * kGroupTokens;
        __syncwarp();
        part.valid = start(stage, part, pages_of(token < part.len ? look_up(part.sequence, token) : -1, 0));
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
        if (part.valid == 0) continue;
        this->template compute<false>(stage, part.valid, part.kv_head, part.first_token, part.len, state, o);
      }
      __syncwarp();
      Columns::take_sums(state, o);
      state.sum[0][0] = sums[0];
      state.sum[0][1] = sums[1];
    }
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

}  // namespace pykv::attention
