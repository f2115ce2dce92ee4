// Decoding proper on the line: sizes of one instantiation, and what a warp keeps of a tile.
#pragma once

#include "attention/cuda/plan_sizes.h"
#include "attention/cuda/tile_shape.cuh"

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

// Sizes are those of line_sizes().  kForAnyBatch: with batch_invariant.  kTokens: queries are of several tokens.
template <class Element, int kD, bool kPackedV, int kQueries, bool kForAnyBatch, bool kSingle = false,
          bool kTokens = false>
struct DecodeShape : ColumnsShape<Element, kD, kPackedV, kQueries> {
  using Few = ColumnsShape<Element, kD, kPackedV, kQueries>;
  static constexpr LineSizes kSizes =
      line_sizes(kKindOf<Element>, kD, kPackedV, kQueries, kForAnyBatch, kSingle, kTokens);
  static constexpr bool kInvariant = kForAnyBatch, kManyTokens = kTokens, kHidesKeys = !kForAnyBatch && !kTokens;
  static constexpr bool kLate = kSizes.late;  // the next tile's copies start after the wait for this one's
  static constexpr bool kHalfLinesMeet = Few::kRowBytes == 64;  // heads of 64 bytes
  static constexpr int kHeads = kSizes.heads, kWarps = kSizes.warps, kUnitTokens = kSizes.unit_tokens();
  static constexpr int kLead = kSizes.lead;  // places of the line for what a segment begins and ends with
  static constexpr int kBlocksPerSm = kSizes.blocks_of_sm;
  static constexpr int kStageBytes = kSizes.stage_bytes();  // there a warp leaves its sums
  static constexpr int kStages = kSizes.stages, kRingBytes = kStages * kStageBytes;
};

// The same over rows of tokens without what windows need: calls begin sooner by what is not to be fetched and executed.
template <class Line>
struct SeesAll : Line {
  static constexpr bool kHidesKeys = false;
};

// Pages that are no whole groups of eight tokens, such as those of one: each token's page is looked up, by the lane of its place in a
// tile.
template <class Shape>
struct SmallPages : Shape {
  static constexpr bool kByToken = true;
};

// Two KV heads of up to 64 dimensions that lie side by side, taken as one of up to 128, where one alone would fill half a tile.
//
// Their queries are the columns of one tile, and each is zero in the other head's dimensions: scores are right, and of the sums a
// column's own head is half, the rest is left out.  So there are half as many tiles, whose rows are longer pieces of memory, and for
// elements that are to be widened half the softmax of a byte.  The products are twice as many, for which there is time.
//
// Zero times what is no number is none, either: sums that are not finite are made again head by head (DecodeLoader::separate).
//
// With several tokens over elements of one byte each head has products of its own, without zeros: verify/codes.cuh.
template <class Shape>
struct Folded : Shape {
  static constexpr bool kFolded = true;
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
