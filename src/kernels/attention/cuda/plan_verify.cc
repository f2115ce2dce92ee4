// Up to 64 query rows by four warps together, on Hopper.
#include "attention/cuda/planner.h"

namespace pykv::attention {

// Can four warps together multiply so many rows of a KV head?
bool Planner::may_verify(const Request& r, RowClass rows) const {
  const PagedAttentionArgs& a = r.a;
  const bool suits_rows = rows == RowClass::kFew || has_17_to_64_rows(rows);
  const bool suits_kind = is_common(r.kind) || (r.kind != CacheKind::kNvfp4 && a.head_size > 64);
  const bool suits_cache = suits_kind && a.key.chunk >= a.head_size && a.value.dim == 1;
  return suits_rows && suits_cache && a.head_size <= 128 && !r.sparse && !a.batch_invariant && d_.has_warpgroups;
}

// ... and are there so many sequences that for few rows, too, this is quicker than the lines of decoding?
bool Planner::fills_verify(const Request& r) const {
  return r.sees_all() && may_verify(r, RowClass::kFew) && r.heads() >= d_.sms;
}

bool Planner::verify_line(const Request& r, RowClass rows, const VerifySizes& s) {
  Tiling tiling = tiling_of(rows, r.a.head_size);
  tiling.lead = s.rows > 32 ? 5 : 3;  // measured on an H100; it may be 3 to 8
  // Pairs have no workspace for more than two blocks.
  return line(r, {KernelId::kVerifyLine, s.head_size, s.rows}, 2 * kThreads, s.line_bytes, 2, kVerifyTile, tiling);
}

// Few, Some or More rows, where may_verify().
bool Planner::verify(const Request& r, RowClass rows) {
  if (r.kind != CacheKind::k16Bits && rows != RowClass::kMore && r.can_pair_codes()) {  // heads of 64 in pairs
    const bool few = rows == RowClass::kFew;
    return verify_line(r.fold(), few ? RowClass::kSome : RowClass::kMore, verify_sizes(true, 128, few ? 32 : 64, true));
  }
  const int tile_rows = rows == RowClass::kFew ? 16 : rows == RowClass::kSome ? 32 : 64;
  return verify_line(r, rows, verify_sizes(r.kind != CacheKind::k16Bits, rounded(r.a.head_size), tile_rows, false));
}

// Returns false if there are more KV heads than find room at once or, where they are to share keys, too many for that.
bool Planner::verify_cluster(const Request& r, const VerifySizes& sizes, bool alone, bool may_span) {
  const int threads = (alone ? 2 : 3) * kThreads, bytes = alone ? sizes.alone_bytes : sizes.cluster_bytes;
  for (int blocks = alone ? 1 : kMostBlocks; blocks > 0; --blocks) {
    const int clusters = resident_clusters(blocks, threads, bytes, alone ? 2 : 1);
    const int64_t heads = r.heads();
    if (heads > clusters) continue;
    const int spans = may_span ? static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans)) : 1;
    if (may_span && (blocks < kMostBlocks || spans < kFewestSpans)) return false;
    const KernelId id = may_span ? KernelId::kVerifySpans : alone ? KernelId::kVerifyBlock : KernelId::kVerifyCluster;
    Request tiles = r;
    tiles.set_rows(sizes.rows);
    Step s =
        step_of(r, {id, sizes.head_size, sizes.rows}, static_cast<int>(heads * spans * blocks), threads, blocks, bytes);
    s.query_rows = sizes.rows;
    s.kv_tile = kVerifyTile;
    set_cluster(s, r, tiles.tile_tokens * tiles.tile_heads, 1);  // a block finishes whole rows
    if (r.lengths != Lengths::kAny) s.balance = balance_of(r, LineOf::kVerify, blocks, alone ? 2 : 1);
    if (may_span) {
      constexpr float kAlone = 4608;  // keys, as quickly by one cluster as by very many; measured on an H100
      s.spans = spans;
      s.pitch = sizes.head_size;
      s.keys_alone = static_cast<int>(kAlone * static_cast<float>(spans) / static_cast<float>(spans - 1));
      s.early_blocks = s.grid;  // the sequence may be short
    }
    return with_line(r, LineOf::kVerify, s);
  }
  return false;
}

// Do all sequences, as far as the host can tell, have so many tokens that a tile has `rows` of them, and short keys, unless it is
// the device that tells or clusters share them?  One that had far more would keep its cluster busy when the others had finished.
bool Planner::suits_verify_clusters(const Request& r, int rows) const {
  const int64_t tokens = r.a.num_tokens / r.a.num_seqs;
  const bool is_short = std::min<int64_t>(r.max_seq_len, int64_t{r.window} + tokens) <= kMostOfFew;
  return r.a.num_tokens % r.a.num_seqs == 0 && tokens * r.group <= rows && r.min_rows == 0 &&
         (is_short || r.lengths == Lengths::kForClusters || suits_spans(r));
}

// 17 to 64 rows of short calls, where may_verify().  Returns false if these kernels do not suit the call.
bool Planner::verify_clusters(const Request& r) {
  if (!is_common(r.kind)) return false;
  const int rows = suits_verify_clusters(r, 32) ? 32 : suits_verify_clusters(r, 64) ? 64 : 0;
  if (rows == 0) return false;
  const bool narrow = r.kind != CacheKind::k16Bits, many = rows > 32;
  const VerifySizes sizes = verify_sizes(narrow, rounded(r.a.head_size), rows, false);
  if (suits_spans(r)) return verify_cluster(r, sizes, false, true);
  // Of 64 rows many heads over elements of one byte are quicker by the line, unless keys are few.
  constexpr int64_t kFewKeys = 2048;
  const bool suits_alone = !many || !narrow || r.max_seq_len <= kFewKeys;
  return verify_cluster(r, sizes, false, false) || (suits_alone && verify_cluster(r, sizes, true, false));
}

}  // namespace pykv::attention
