// Decoding proper on the line: sizes of one instantiation, and what a warp keeps of a tile.
#pragma once

#include "attention/paged_attention_chunks.cuh"

namespace pykv::attention {

// kQueries: 4, 8 or 16, the heads of a group at most.  kForAnyBatch: with batch_invariant.  kDeep: two blocks on an SM with
// three stages, not three with two.  kSingle: KV heads are not taken in pairs.  kTokens: queries are
// of several tokens.
template <class Element, int kD, bool kPackedV, int kQueries, bool kForAnyBatch, bool kDeep = false,
          bool kSingle = false, bool kTokens = false>
struct DecodeShape : Shape<Element, kD, kPackedV, RowClass::kFew> {
  using Few = Shape<Element, kD, kPackedV, RowClass::kFew>;
  static constexpr bool kInvariant = kForAnyBatch, kManyTokens = kTokens, kHidesKeys = !kForAnyBatch && !kTokens;
  // Sixteen columns leave twelve warps no registers for their queries.
  static constexpr bool kSharedQueries = kQueries == 16 && kD == 128 && Few::kNarrow && !kForAnyBatch;
  // Two blocks of six warps leave fewer pieces than three of four.  Elements of one byte do best with a tile of each warp
  // under way, not two: the next one's copies start after the wait for its own.
  static constexpr bool kSixWarps = kD == 128 && (kQueries <= 8 || kSharedQueries) && !kForAnyBatch && !Few::kNvfp4;
  // Of heads of 256 there is room for one such block.
  static constexpr bool kSixOfWide = kD == 256 && kQueries <= 8 && !kForAnyBatch && !Few::kNvfp4;
  static constexpr bool kLate = Few::kNarrow && (kSixWarps || (kForAnyBatch && kD == 128 && kQueries == 8 && !kDeep));
  static constexpr bool kTwins = kQueries == 4;
  static constexpr bool kHalfLinesMeet = Few::kRowBytes == 64;  // heads of 64 bytes
  // KV heads of a segment, warp by warp: neighbours in memory are read together, and there are half as many ends.  The
  // block of twelve warps has the units of two blocks of six.
  static constexpr int kHeads = kSixWarps && kLate && !kPackedV && !kSingle ? 2 : 1;
  static constexpr int kWarps = kSixWarps || kSixOfWide ? 6 * kHeads : 4, kColumns = kQueries;
  static constexpr int kUnitTokens = kWarps / kHeads * Few::kTile;
  static constexpr int kBlocksPerSm = kSixWarps                                                 ? 2 / kHeads
                                      : kD == 64                                                ? 4
                                      : kD == 256                                               ? 1
                                      : kDeep || (kQueries == 16 && (Few::kNarrow || kPackedV)) ? 2
                                                                                                : 3;
  static constexpr bool kRaw = Few::kNvfp4;
  static constexpr int kHalvesBytes = kRaw ? Few::kStageBytes : 0;
  static constexpr int kStageBytes = kRaw ? nvfp4_bytes(2 * Few::kTile * kD) : Few::kStageBytes;
  static constexpr int kStages = kRaw ? 4 : kSixWarps || kSixOfWide || kBlocksPerSm > 2 ? 2 : 3;
  static constexpr int kRingBytes = kHalvesBytes + kStages * kStageBytes;
};

// The same without what windows and sparsity need: calls begin sooner by what is not to be fetched and executed.
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
