// Decoding proper on the line: sizes of one instantiation, and what a warp keeps of a tile.
#pragma once

#include <algorithm>

#include "attention/paged_attention_chunks.cuh"

namespace pykv::attention {

// Queries as columns: what a tile of tokens is.  Codes of nvfp4 stay codes.
template <class Element, int kD, bool kPackedV, int kQueries>
struct ColumnsShape : Shape<Element, kD, kPackedV, RowClass::kFew> {
  using Few = Shape<Element, kD, kPackedV, RowClass::kFew>;
  static constexpr int kColumns = kQueries;
  static constexpr bool kRaw = Few::kNvfp4;
  static constexpr int kTile = kRaw && kQueries <= 16 ? 32 : Few::kTile;
  static constexpr int kTileBytes = kRaw ? nvfp4_bytes(kTile * kD) : Few::kTileBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
};

// Are lines of packed values the tokens of four tiles, which are then to be read together?
template <class S>
__host__ __device__ constexpr bool tiles_share_lines(int64_t block_size) {
  return S::kPackedV && block_size > 2 * S::kTile;
}

// kQueries: 8 or 16, the heads of a group at most.  kForAnyBatch: with batch_invariant.  kDeep: two blocks on an SM with
// three stages, not three with two.  kSingle: KV heads are not taken in pairs.  kTokens: queries are
// of several tokens.
template <class Element, int kD, bool kPackedV, int kQueries, bool kForAnyBatch, bool kDeep = false,
          bool kSingle = false, bool kTokens = false>
struct DecodeShape : ColumnsShape<Element, kD, kPackedV, kQueries> {
  using Few = ColumnsShape<Element, kD, kPackedV, kQueries>;
  static constexpr bool kInvariant = kForAnyBatch, kManyTokens = kTokens, kHidesKeys = !kForAnyBatch && !kTokens;
  // Sixteen columns leave twelve warps no registers for their queries.
  static constexpr bool kSharedQueries = kQueries == 16 && kD == 128 && Few::kNarrow && !kForAnyBatch;
  // Two blocks of six warps leave fewer pieces than three of four; but lines of packed values may be the tokens of four tiles, which
  // are to be read together.  nvfp4 has eight warps, for it takes instructions.
  static constexpr bool kEightWarps = Few::kRaw && kD <= 128 && kQueries <= 8;
  static constexpr bool kTwelveOfSm = kD == 128 && (kQueries <= 8 || kSharedQueries) && !kForAnyBatch;
  static constexpr bool kThreeBlocks = kTwelveOfSm && kPackedV, kSixOrEightWarps = kEightWarps || kTwelveOfSm;
  // Of heads of 256 there is room for one such block.
  static constexpr bool kSixOfWide = kD == 256 && kQueries <= 8 && !kForAnyBatch && !kPackedV;
  // Elements of one byte do best with a tile of each warp under way, not two: the next one's copies start after the wait for its own.
  static constexpr bool kLate =
      (Few::kNarrow || Few::kRaw) && (kSixOrEightWarps || (kForAnyBatch && kD == 128 && kQueries == 8 && !kDeep));
  static constexpr bool kHalfLinesMeet = Few::kRowBytes == 64;  // heads of 64 bytes
  // KV heads of a segment, warp by warp: neighbours in memory are read together, and there are half as many ends.  The block of
  // twelve warps has the units of two blocks of six.  Of nvfp4, whose neighbours share lines, 64 x 8k took 330 us without it, not 247.
  static constexpr int kHeads = kSixOrEightWarps && kLate && !kPackedV && !kSingle ? 2 : 1;
  static constexpr int kWarps = kEightWarps                                    ? 8 * kHeads
                                : (kTwelveOfSm && !kThreeBlocks) || kSixOfWide ? 6 * kHeads
                                                                               : 4;
  static constexpr int kUnitTokens = kWarps / kHeads * Few::kTile;
  static constexpr int kLead = kForAnyBatch ? 0 : 1;  // places of the line for what a segment begins and ends with
  static constexpr int kBlocksPerSm = kThreeBlocks       ? 3
                                      : kSixOrEightWarps ? 2 / kHeads
                                      : kD == 64         ? 4
                                      : kD == 256        ? 1
                                      : kDeep || (kQueries == 16 && (Few::kNarrow || Few::kRaw || kPackedV)) ? 2
                                                                                                             : 3;
  static constexpr int kStageBytes = std::max(Few::kStageBytes, kQueries * kD * 4);  // there a warp leaves its sums
  // One KV head of nvfp4 has two, for chips with 99 KB of shared memory for a block.
  static constexpr int kStages = Few::kRaw                                       ? (kEightWarps && kSingle ? 2 : 3)
                                 : kTwelveOfSm || kSixOfWide || kBlocksPerSm > 2 ? 2
                                                                                 : 3;
  static constexpr int kRingBytes = kStages * kStageBytes;
};

// The same over rows of tokens without what windows need: calls begin sooner by what is not to be fetched and executed.
template <class Line>
struct SeesAll : Line {
  static constexpr bool kHidesKeys = false;
};

// A warp's tile, from its copies to its arithmetic.
struct alignas(16) TilePart {
  int sequence, len, kv_head, first_token;
  int first_key;  // that some query sees
  int slot;
  uint32_t valid;
  bool exists, begins, ends;
  bool ends_chunk;  // with batch_invariant
};

// The same where a sequence has several query tokens: those, and which tile of them.
struct TokensPart : TilePart {
  int query_begin, query_len, query_tile;
};

template <class S>
using PartOf = std::conditional_t<S::kManyTokens, TokensPart, TilePart>;

}  // namespace pykv::attention
