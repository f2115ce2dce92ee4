// Sizes of the kernels of paged attention, as numbers for cuda/plan.cc.  The kernels' own constants are compared with them where
// they are launched (static_assert).
#pragma once

#include <algorithm>

#include "attention/cuda/plan.h"

namespace pykv::attention {

// Of structures that lie in shared memory or in the workspace.
constexpr int kUnitBytes = 64, kWalkerBytes = 176, kNoteBytes = 80, kLineEndsBytes = 2 * kNoteBytes, kPlanBytes = 64,
              kLineShareBytes = 48;
constexpr int kPrefillBytes = 1232, kCountsBytes = 256;  // the latter with what aligns other things behind them
constexpr int kSimpleBytes = 2800,
              kSimpleOwnBytes = 8192;  // that the plain kernel declares itself, and what is left for that
constexpr int kQuadBytes = 16, kStatsBytes = 8, kExactQuadBytes = 80, kLeafBytes = kQuadBytes + kStatsBytes;
constexpr int kTeamWarps = 4;  // that take a chunk together

// Queries as columns, against a tile of tokens for each warp.  Codes of nvfp4 stay codes.
struct ColumnSizes {
  CacheKind kind;
  int head_size;  // rounded up to 64, 128 or 256
  int columns;    // queries, times heads of a group

  constexpr bool raw() const { return kind == CacheKind::kNvfp4; }
  constexpr bool narrow() const { return !raw() && kind != CacheKind::k16Bits; }  // elements that registers widen
  constexpr int element_bytes() const { return narrow() ? 1 : 2; }
  constexpr int tile() const { return raw() && columns <= 16 ? 32 : 32 / element_bytes(); }
  constexpr int tile_bytes() const {
    const int elements = tile() * head_size;
    return raw() ? static_cast<int>(nvfp4_bytes(elements)) : elements * element_bytes();
  }
};

// The line of decoding and of several tokens.
struct LineSizes : ColumnSizes {
  bool packed, invariant, tokens;
  bool late;                 // a tile of each warp under way, not two: best for elements of one byte
  int heads, warps, stages;  // KV heads of a segment, warp by warp
  int blocks_of_sm, lead;

  constexpr int unit_tokens() const { return warps / heads * tile(); }
  constexpr int stage_bytes() const { return std::max(2 * tile_bytes(), columns * head_size * 4); }
  constexpr int shared_bytes() const {
    const int part_bytes = tokens ? 48 : 32;
    return warps * (stages * (stage_bytes() + part_bytes) + columns * kStatsBytes) + kLineShareBytes;
  }
};

// columns: 8 or 16, the heads of a group at most.  single: KV heads are not taken in pairs.  tokens: queries are of several tokens.
constexpr LineSizes line_sizes(CacheKind kind, int head_size, bool packed, int columns, bool invariant,
                               bool single = false, bool tokens = false) {
  LineSizes s{{kind, head_size, columns}, packed, invariant, tokens, false, 1, 4, 2, 2, invariant ? 0 : 1};
  const bool widens = s.narrow() || s.raw();
  // Two blocks of six warps leave fewer pieces than three of four; but lines of packed values may be the tokens of four tiles, which
  // are to be read together.  nvfp4 has eight warps, for it takes instructions.
  const bool eight_warps = s.raw() && head_size <= 128 && columns <= 8;
  const bool twelve_of_sm = head_size == 128 && columns <= 8 && !invariant;
  const bool three_blocks = twelve_of_sm && packed, six_or_eight = eight_warps || twelve_of_sm;
  const bool six_of_wide = head_size == 256 && columns <= 8 && !invariant;  // there is room for one such block
  s.late = widens && (six_or_eight || (invariant && head_size == 128 && columns == 8));
  // Neighbours in memory are read together, and there are half as many ends.  The block of twelve warps has the units of two blocks
  // of six.  Of nvfp4, whose neighbours share lines, 64 x 8k takes 263 us without it, not 235; of int8 253, not 247.
  s.heads = six_or_eight && s.late && !packed && !single ? 2 : 1;
  s.warps = eight_warps ? 8 * s.heads : (twelve_of_sm && !three_blocks) || six_of_wide ? 6 * s.heads : 4;
  const bool two_blocks = columns == 16 && widens;
  s.blocks_of_sm = three_blocks       ? 3
                   : six_or_eight     ? 2 / s.heads
                   : head_size == 64  ? 4
                   : head_size == 256 ? 1
                   : two_blocks       ? 2
                                      : 3;
  // One KV head of nvfp4 has two, for chips with 99 KB of shared memory for a block.
  s.stages = s.raw() ? (eight_warps && single ? 2 : 3) : twelve_of_sm || six_of_wide || s.blocks_of_sm > 2 ? 2 : 3;
  return s;
}

// Which lines there are.
constexpr bool has_line(const LineSizes& s) {
  const bool few = s.columns <= 8, large = s.head_size > 128;
  if (s.kind == CacheKind::kNvfp4) return !s.invariant && !s.packed;
  if (s.narrow() && s.tokens) return s.kind == CacheKind::kE4M3 && few;
  if (!is_common(s.kind)) return few && !large && !s.invariant && !s.packed;
  if (s.invariant) return few && !s.packed;
  return s.packed ? few && !large : !s.narrow() || few || s.head_size == 64;
}

// Clusters of decoding and of several tokens.
struct ClusterSizes : ColumnSizes {
  bool wide, invariant, tokens, hides_keys, by_token;
  int warps, stages;  // at most

  constexpr int usual_warps() const { return head_size <= 128 ? 8 : 4; }
  constexpr int ring_bytes() const { return std::max(stages * 2 * tile_bytes(), columns * head_size * 4); }
  // Clusters beside each other may share their keys, but for small pages and wide blocks.  What one token sees through a window is
  // too little (kMostWindow).
  constexpr bool may_span() const { return is_common(kind) && !by_token && !wide && (tokens || !hides_keys); }
  constexpr int shared_bytes(int block_warps) const {  // but with batch_invariant
    const int items = columns * head_size / 4 + kMostBlocks;
    const int exchange = warps * columns * kStatsBytes + items * kLeafBytes;
    return block_warps * ring_bytes() + (exchange + 8 + 15) / 16 * 16;
  }
  // With batch_invariant: maxima and sums of the warps, and a barrier.
  constexpr int exact_stats_bytes(int block_warps) const { return block_warps * columns * kStatsBytes + 16; }
  // Blocks that registers leave room for, on an SM: of sm_90a.
  constexpr int blocks_of_sm() const {
    const bool fit = columns <= 8 || kind == CacheKind::k16Bits;
    return head_size <= 64 && fit && !wide && !invariant && !tokens ? 2 : 1;
  }
};

// wide: more warps, or smaller blocks, of fewer stages.
constexpr ClusterSizes cluster_sizes(CacheKind kind, int head_size, int columns, bool wide, bool invariant,
                                     bool tokens = false) {
  ClusterSizes s{{kind, head_size, columns}, wide, invariant, tokens, tokens, false, 0, 0};
  s.warps = wide ? s.usual_warps() * 3 / 2 : s.usual_warps();
  s.stages = wide ? 2 : 3;
  return s;
}

// Which clusters of one token there are for kinds that are not common: the usual size, up to eight columns.
constexpr bool has_cluster(CacheKind kind, int head_size, int columns) {
  return is_common(kind) || (columns <= 8 && head_size <= 128 && (kind != CacheKind::kNvfp4 || head_size == 128));
}

// The line of calls that see all keys, for blocks that are those of a cluster.
constexpr LineSizes line_of_clusters(LineSizes line, const ClusterSizes& cluster) {
  line.late = line.late && line.stages == cluster.stages;  // with as much under way
  line.heads = line.blocks_of_sm = 1;
  line.warps = cluster.warps;
  line.stages = cluster.stages;
  line.lead = 4;  // measured on an H100
  return line;
}

// Of several tokens: columns that one kernel takes as clusters and as the line.  Sixteen of 16-bit elements are quicker by the line
// of warpgroups, if it is a line.
constexpr bool has_either(CacheKind kind, int head_size, int columns) {
  if (head_size == 128) return columns == 8 || (columns == 16 && kind != CacheKind::k16Bits);
  return columns == (head_size == 256 ? 8 : 16);
}

// Are there tiles of 128 rows of mma.sync?
constexpr bool has_many_rows(CacheKind kind, bool packed) { return is_common(kind) && !packed; }

// Tiles of mma.sync, of a class that mma_rows() gives.
struct MmaSizes {
  int rows, tile, blocks_of_sm, shared_bytes;
};
constexpr MmaSizes mma_sizes(CacheKind kind, int head_size, RowClass rows) {
  const bool narrow = kind != CacheKind::k16Bits && kind != CacheKind::kNvfp4, wide = head_size == 256;
  const bool chunks = rows == RowClass::kInvariantMore, more = rows == RowClass::kMore || chunks;
  const int warp_rows = more || wide ? 16 : 32;
  MmaSizes s{4 * warp_rows, wide && !narrow ? 32 : 64, wide && chunks ? 1 : 2, 0};
  const int stage = 2 * s.tile * head_size * (narrow ? 1 : 2);
  // Chips with 99 KB of shared memory for a block have room for two of 32 KB.
  const int stages = more && !chunks && stage < 32 << 10 ? 3 : 2;
  const int slot = (s.tile * 16 + kUnitBytes + s.tile / 32 * 4 + 15) / 16 * 16;
  const int queries = more && !narrow && !wide ? 0 : s.rows * head_size * 2;
  const int waiting = chunks && !wide ? (head_size / 8 + 1) * kThreads * 16 : 0;
  const int scratch = kPlanBytes + kWalkerBytes + kLineEndsBytes + 4 * warp_rows * 16;
  s.shared_bytes = stages * stage + (stages + 2) * slot + queries + waiting + scratch;
  return s;
}

// Tiles of four warps together: rows, or columns if there are up to 32 or elements have one byte.
constexpr int kVerifyTile = 64;  // tokens
struct VerifySizes {
  int head_size, rows, line_bytes, cluster_bytes, alone_bytes;  // alone: a block without a cluster
};
// pairs: two heads of 64 as one of 128.
constexpr VerifySizes verify_sizes(bool narrow, int head_size, int rows, bool pairs) {
  constexpr int kOfStage = 1136, kOfColumns = 4272, kOfColumn = 32,
                kOfRows = 5232;  // beside tiles, queries and weights
  const bool columns = narrow || rows <= 32, large = head_size > 64, many = rows > 32;
  const int stage = 2 * kVerifyTile * head_size * (narrow ? 1 : 2), stages = narrow ? (32 << 10) / stage : 3;
  const int of_tiles = stages * (stage + kOfStage) + (narrow ? kVerifyTile * 128 : 0) + kLineEndsBytes;
  const int of_queries = columns ? rows * head_size * 2 + kOfColumns + kOfColumn * rows : kOfRows;
  // Those of clusters have more stages, and what their blocks send each other: [narrow][large][many].
  constexpr int kOfCluster[2][2][2] = {{{103568, 116816}, {193680, 219216}}, {{87184, 110736}, {144528, 188560}}};
  constexpr int kOfAlone[2][2][2] = {{{79792, 75632}, {81872, 73616}}, {{55216, 60336}, {57296, 66512}}};
  const bool has_clusters = rows > 16 && !pairs;
  return {head_size, rows, of_tiles + of_queries, has_clusters ? kOfCluster[narrow][large][many] : 0,
          has_clusters ? kOfAlone[narrow][large][many] : 0};
}

struct PrefillSizes {
  int rows, tile, shared_bytes;
};
constexpr PrefillSizes prefill_sizes(int head_size, bool invariant) {
  const int rows = 128, tile = head_size > 128 ? 64 : 128;
  const int stages = head_size > 128 || (invariant && head_size > 64) ? 2 : 3;
  const int staged = invariant ? 2 * kThreads * (head_size / 8) * 16 : 0;
  return {rows, tile, (rows + 2 * stages * tile) * head_size * 2 + staged + kPrefillBytes + 1024};
}

}  // namespace pykv::attention
