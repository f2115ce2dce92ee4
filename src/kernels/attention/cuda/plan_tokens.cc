// Several query tokens as columns, and pages of no whole groups of eight tokens.
#include "attention/cuda/planner.h"

namespace pykv::attention {

// Completes `r` but for its clusters, and gives the size of these; no blocks: these kernels do not suit the call.
Clusters Planner::tokens_size(Request& r, const ClusterSizes& s) const {
  constexpr Clusters kNone{0, 0};
  // Of queries: more take longer than the line, unless that widens elements for few rows at a time.
  const int64_t most_tiles = s.narrow() ? 4 : s.head_size > 128 ? 2 : 1;
  // A guess: all have as many tokens.  One that had far more would keep its cluster busy when the others had finished.
  if (r.a.num_tokens % r.a.num_seqs != 0) return kNone;
  const int64_t tokens = r.a.num_tokens / r.a.num_seqs;
  if (!suits_loader(r, s, false, s.by_token) || r.a.batch_invariant || r.sparse || r.min_rows > 0) return kNone;
  r.set_rows(s.columns);
  r.tile_tokens = static_cast<int>(std::min<int64_t>(r.tile_tokens, tokens));
  const int64_t tiles = ceil_div(tokens, r.tile_tokens) * r.head_tiles;
  if (tiles > most_tiles || (tiles > 1 && most_keys(r, s.tile()) > kMostOfFew)) return kNone;
  // Clusters beside each other read the same keys at about the same time, so that only one reads them from memory.
  const auto size_for = [&](int64_t ways) {
    r.ways = static_cast<int>(ways);
    return cluster_size(r, s);
  };
  Clusters size = size_for(tiles);
  if (tiles > 1 && size.warps < s.warps) {
    // Blocks of half the size, or tiles one after the other, take longer than the line of warpgroups.
    if (r.sees_all() && may_verify(r, RowClass::kMore)) return kNone;
    size = size_for(1);
  }
  const bool two_fit = 2 * (s.shared_bytes(s.warps / 2) + 1024) <= 228 << 10;
  if (!two_fit && size.warps < s.warps) return kNone;  // blocks of half the size, of which an SM should have two
  return size;
}

// Returns false if these kernels do not suit the call.
bool Planner::tokens_clusters(const Request& given, int head_size, int columns) {
  ClusterSizes s = cluster_sizes(given.kind, head_size, columns, false, false, true);
  if (!is_common(given.kind) || given.lengths == Lengths::kForLine) return false;
  if (has_either(given.kind, head_size, columns) && given.lengths == Lengths::kForClusters) {
    const LineSizes single = line_sizes(given.kind, head_size, false, columns, false, true, true);
    const LineSizes of_line = line_of_clusters(single, s);
    Request r = given;
    if (suits_tokens(r, of_line)) {
      const Clusters size = tokens_size(r, s);
      const bool suits = size.blocks > 0 && size.warps == s.warps && r.ways == 1;
      Step* step = suits ? clusters_or_line(r, s, of_line, size, r.tile_tokens * r.tile_heads) : nullptr;
      if (step) {
        step->balance = balance_of(r, LineOf::kDecoding, size.blocks, 1);
        return true;
      }
    }
  }
  s.by_token = head_size <= 128 && given.a.block_size % kGroupTokens != 0;
  Request r = given;
  const Clusters size = tokens_size(r, s);
  return size.blocks > 0 && clusters(r, s, size);
}

// Of elements that are to be widened: on the line, with the queries of a sequence as up to 16 columns; of nvfp4 up to twice, for
// else a warp would leave halves of its tiles in shared memory, but not of few KV heads, for one block adds up what all leave.
bool Planner::tokens_line(const Request& r, int columns) {
  const LineSizes s = line_sizes(r.kind, 128, false, columns, false, false, true);
  const bool are_many = r.heads() >= d_.sms / 8;
  const int most_tiles = s.raw() && columns == 16 && are_many ? 2 : 1;
  return ceil_div(r.a.num_tokens, r.a.num_seqs) * r.group <= most_tiles * columns && suits_tokens(r, s) && lines(r, s);
}

// Decoding over pages that are no groups of eight tokens: heads up to 128 in rows of tokens, up to eight in a group.
bool Planner::small_pages(const Request& r) {
  if (!is_common(r.kind) || r.a.batch_invariant || r.a.head_size > 128) return false;
  const LineSizes s = line_sizes(r.kind, rounded(r.a.head_size), false, 8, false);
  return suits_decode(r, s, true) && lines(r, s, true);
}

// Up to 16 rows of short calls and of one-byte caches that verify leaves, and decoding over small pages.  Returns false if these
// kernels do not suit the call.
bool Planner::tokens(const Request& r) {
  if (r.packed()) return false;
  const int64_t columns = r.a.num_tokens / r.a.num_seqs * r.group;  // a sequence's, if all have as many tokens
  const auto by_clusters = [&](int head_size, int tile) { return tokens_clusters(r, head_size, tile); };
  if (r.a.head_size > 128) {
    if (by_clusters(256, 8)) return true;
  } else if (r.a.head_size > 64) {
    if (by_clusters(128, columns <= 8 ? 8 : 16)) return true;
    if (r.kind != CacheKind::k16Bits && r.lengths != Lengths::kForClusters && !fills_verify(r) &&
        (tokens_line(r, 8) || tokens_line(r, 16))) {
      return true;
    }
  } else if (by_clusters(64, 16)) {
    return true;
  }
  return r.lengths == Lengths::kAny && small_pages(r);
}

}  // namespace pykv::attention
