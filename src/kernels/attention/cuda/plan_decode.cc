// One query token of each sequence.
#include "attention/cuda/planner.h"

namespace pykv::attention {

// Of a piece there are more rows than workspaces are made for, but fewer blocks.
Tiling Planner::line_tiling(const Request& r, const LineSizes& s) {
  Tiling tiling = few_rows_tiling(r.a.head_size);
  tiling.rows = std::max(tiling.rows, s.heads * s.columns);
  tiling.tile_rows = s.columns;
  return tiling;
}

// On the line, of a call that suits.  Returns false if there is no such kernel, or the device has too little shared memory for it.
bool Planner::line_kernel(const Request& r, const LineSizes& s, bool by_token) {
  if (!has_line(s)) return false;
  const KernelId id = s.tokens      ? KernelId::kTokensLine
                      : s.invariant ? KernelId::kInvariantLine
                      : by_token    ? KernelId::kSmallPagesLine
                      : r.folded    ? KernelId::kFoldedLine
                                    : KernelId::kDecodeLine;
  Instance instance{id, s.head_size, s.columns};
  instance.packed = s.packed;
  instance.single = s.heads == 1;
  instance.sees_all = r.folded || (has_sees_all(s) && !by_token && r.sees_all());
  return line(r, instance, s.warps * 32, s.shared_bytes(), s.blocks_of_sm, s.unit_tokens(), line_tiling(r, s));
}

// With KV heads in pairs, if the line takes them so, they are pairs, and blocks have room for them; else one by one.
bool Planner::lines(const Request& r, const LineSizes& s, bool by_token) {
  if (s.heads > 1 && r.num_kv_heads % s.heads == 0 && line_kernel(r, s, by_token)) return true;
  const LineSizes single = line_sizes(s.kind, s.head_size, s.packed, s.columns, s.invariant, true, s.tokens);
  return line_kernel(r, single, by_token);
}

// Few sequences whose tables have room for long ones: by one kernel that can be clusters or the line (decode/either.cuh).
bool Planner::decode_either(const Request& r, const ClusterSizes& usual, const LineSizes& of_line) {
  ClusterSizes wide = cluster_sizes(usual.kind, usual.head_size, usual.columns,
                                    usual.head_size == 128 || !usual.narrow(), usual.invariant);
  // By blocks as the line has them, if an SM has one; else by those of clusters, of twelve warps where elements are to be widened.
  const bool as_line = of_line.warps == wide.warps && of_line.blocks_of_sm == 1;
  const ClusterSizes& sizes = as_line || of_line.narrow() ? wide : usual;
  const LineSizes as = as_line ? of_line : line_of_clusters(of_line, sizes);
  constexpr int64_t kAlike = 2048;  // tokens; where no table has room for a page more, clusters lose little
  if (r.a.num_seqs <= 1 || r.max_seq_len < kAlike + r.a.block_size || r.num_kv_heads % as.heads != 0) return false;
  Request in_short_table = r;  // the size of clusters is made for these
  in_short_table.max_seq_len = std::min<int64_t>(r.max_seq_len, kMostOfFew);
  const Clusters size = cluster_size(in_short_table, sizes);
  if (size.warps != sizes.warps || size.blocks == 0) return false;
  // What a block reads with twice its part of the bandwidth or less, when the others have finished; the line begins and ends later
  // by 5 us and more.  Measured on an H200.
  const int slack_bytes = sizes.narrow() ? 3 << 18 : 1 << 19;
  Step* step = clusters_or_line(r, sizes, as, size, r.group);
  if (!step) return false;
  step->balance = balance_for(r.num_kv_heads, static_cast<float>(size.blocks), step->grid, 1,
                              slack_bytes / (2 * sizes.head_size * sizes.element_bytes()));
  return true;
}

// Two KV heads as one, on the line, where may_fold().
bool Planner::folded_line(const Request& given) {
  constexpr int64_t kMany = 1024;  // keys; the ends of fewer are dearer
  const Request r = given.fold();
  const LineSizes s = line_sizes(r.kind, 128, false, r.group > 8 ? 16 : 8, false);
  return suits_decode(r, s) && most_keys(r, s.tile()) >= kMany && lines(r, s);
}

// ... or by clusters or the line, as the device finds the lengths.
bool Planner::folded_either(const Request& given) {
  if (given.group > 4) return false;
  const Request r = given.fold();
  return decode_either(r, cluster_sizes(r.kind, 128, 8, false, false), line_sizes(r.kind, 128, false, 8, false));
}

// Four warps together are quicker for many heads in a group and, over elements of one byte, for sizes of heads between those of
// tiles, and for pairs of heads of 64 that have nine to sixteen columns.
bool Planner::prefers_verify(const Request& r, const LineSizes& s) const {
  const bool many = s.columns == 16;
  if (s.narrow()) {
    const bool wanted = s.head_size == 64    ? !many && r.group > 4 && r.can_pair_codes()
                        : s.head_size == 128 ? many || r.a.head_size < s.head_size
                                             : false;
    return wanted && fills_verify(r);
  }
  const bool may_suit = s.head_size == 128 ? many : s.head_size == 64 && !many;
  const bool wanted = many || (r.group > 4 && fills_verify(r));
  return may_suit && wanted && r.sees_all() && may_verify(r, RowClass::kFew);
}

// Few sequences over rows of tokens, by clusters or by a kernel that can be these.
bool Planner::decode_clusters(Request r, const LineSizes& of_line) {
  const int head_size = of_line.head_size, columns = of_line.columns;
  const bool invariant = of_line.invariant;
  if (invariant && columns > 8) return false;  // the records of more queries find no room
  if (!has_cluster(r.kind, head_size, columns)) return false;
  const ClusterSizes usual = cluster_sizes(r.kind, head_size, columns, false, invariant);
  Clusters size = cluster_size(r, usual);
  if (!is_common(r.kind)) {
    const bool suits = !invariant && r.sees_all() && most_keys(r, usual.tile()) <= kManyKeys * size.blocks;
    return suits && clusters(r, usual, size);
  }
  if (invariant && size.blocks == 0) {  // the line comes after them, and the device says which takes the call
    r.lengths = Lengths::kForClusters;
    size = cluster_size(r, usual);
  }
  if (!invariant && columns <= 8 && r.has_short_window()) {
    ClusterSizes hiding = usual;
    hiding.hides_keys = true;
    return clusters(r, hiding, cluster_size(r, hiding));
  }
  if (!r.sees_all()) return false;  // clusters of several tokens may take it
  if (size.blocks == 0 && columns == 8 && may_fold(r, of_line) && folded_either(r)) return true;
  if (!invariant && columns <= 8 && head_size >= 128 && size.spans == 1) {
    if (decode_either(r, usual, of_line)) return true;
    if (of_line.heads > 1 && r.num_kv_heads % of_line.heads != 0) {
      if (decode_either(r, usual, line_sizes(r.kind, head_size, false, columns, false, true))) return true;
    }
  }
  if (head_size == 128 && columns <= 8 && !invariant) {
    const ClusterSizes wide = cluster_sizes(r.kind, head_size, columns, true, false);
    const int64_t heads = r.heads(), sms = d_.sms;
    Clusters of_wide{0, 0};
    if (size.warps == usual.warps) {
      // Twelve warps, where elements are to be widened and keys are so many that 64 SMs are busier with that than with waiting.
      const bool are_many = size.spans == 1 && most_keys(r, usual.tile()) > kManyKeys * size.blocks;
      if (usual.narrow() && are_many) of_wide = cluster_size(r, wide);
    } else if (size.blocks > 0 && heads > 2 * sms) {
      // More than two blocks for each SM, of four warps, or of three if then all of them find room at once.
      of_wide = {1, heads > 3 * sms && heads <= 4 * sms ? 3 : 4};
    }
    if (of_wide.blocks > 0 && clusters(r, wide, of_wide)) return true;
  }
  return clusters(r, usual, size);
}

// One query token for each sequence.  Returns false if these kernels do not suit the call.
bool Planner::decode(const Request& r) {
  const bool invariant = r.a.batch_invariant;
  const int head_size = rounded(r.a.head_size), columns = head_size > 128 || r.group <= 8 ? 8 : 16;
  const LineSizes s = line_sizes(r.kind, head_size, r.packed(), columns, invariant);
  if (!suits_decode(r, s)) return false;
  if (!r.packed() && r.lengths == Lengths::kAny && decode_clusters(r, s)) return true;
  if (may_prefer_verify(s) && prefers_verify(r, s)) return false;
  if (columns == 8 && may_fold(r, s) && folded_line(r)) return true;
  return lines(r, s);
}

}  // namespace pykv::attention
