// Which kernels take a call, from Planner::all() on; cuda/plan.h says what for.  With what grids and sizes: cuda/plan_steps.cc.
#include "attention/cuda/plan.h"

#include "attention/cuda/planner.h"
#include "core/error.h"

namespace pykv::attention {
namespace {

static_assert(static_cast<int>(CacheKind::kNvfp4) == static_cast<int>(KvFormat::kNvfp4));  // the same kinds

// Can the tensor-core kernels take this call?  They want 16-byte pieces everywhere.
bool suits_mma(const PagedAttentionArgs& a) {
  if (a.dtype == DType::kFloat32 || a.head_size > 256) return false;
  const int bytes = a.kv_format == KvFormat::kSame ? 2 : 1;
  const auto whole = [&](int64_t elements) { return elements * bytes % 16 == 0; };
  const auto small = [&](int64_t elements) { return whole(elements) && elements >= 0 && elements < 1 << 29; };
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };

  const bool head = whole(a.head_size) && a.head_size % 8 == 0;
  const bool rows = aligned(a.query) && aligned(a.out) && a.query_token_stride % 8 == 0 &&
                    a.query_head_stride % 8 == 0 && a.out_token_stride % 8 == 0 && a.out_head_stride % 8 == 0;
  const bool key_chunks = a.key.chunk >= a.head_size || (a.key.chunk * bytes == 16 && small(a.key.chunk_stride));
  const bool key = aligned(a.key.data) && whole(a.key.block) && whole(a.key.token) && whole(a.key.head) && key_chunks;
  const bool value_rows = a.value.dim == 1 && whole(a.value.token);
  const bool value_columns = a.value.dim != 1 && a.value.token == 1 && small(a.value.dim) && whole(a.block_size);
  const bool value =
      aligned(a.value.data) && whole(a.value.block) && whole(a.value.head) && (value_rows || value_columns);
  return head && rows && key && value;
}

}  // namespace

void make_plan(const PagedAttentionArgs& args, const DeviceInfo& device, Plan& plan) {
  plan.count = 0;
  plan.workspace = workspace_bytes(args.num_tokens, args.num_seqs, args.num_heads, args.num_kv_heads, args.head_size,
                                   args.batch_invariant, device);
  const int group = args.num_heads / args.num_kv_heads, window = window_of(args);
  const auto kind = static_cast<CacheKind>(args.kv_format);
  const bool sparse = args.sparse.vert_stride > 1;
  Planner(device, plan).all({args, most_tokens(args), args.num_kv_heads, kind, group, window, sparse, false});
}

void Planner::all(const Request& r) {
  if (suits_mma(r.a) && by_tensor_cores(r)) return;
  plan_.count = 0;
  simple(r);
}

bool Planner::by_tensor_cores(Request r) {
  RowClass rows;
  const auto class_of = [&](RowClass x) { return class_for(x, r.a.batch_invariant); };
  const auto many = [&](int min_rows) {
    r.min_rows = min_rows;
    return prefill(r) || some_rows(r, class_of(RowClass::kMany));
  };
  if (uniform_rows(r.a.num_tokens, r.a.num_seqs, r.group, r.a.head_size, rows)) {
    if (may_be_mixed(rows, r.a.num_tokens, r.a.num_seqs) && mixed(r)) return true;
    return some_rows(r, class_of(rows));
  }
  if (r.group > 16 || r.a.num_seqs == 1) return many(0);
  if (mixed(r)) return true;
  if (!many(16)) return false;
  r.min_rows = 0;
  r.max_rows = 16;
  return some_rows(r, class_of(RowClass::kFew));
}

// Short calls are first asked for in decode() if they see all their keys, unless it is the device that finds them short, or
// those of a short window; those of more rows in verify_clusters(), and others in tokens(): both know windows.  Long ones with a
// window are decode()'s, for its line knows them.  All over pages that are no groups of eight tokens are tokens()'s, if clusters of
// warpgroups have not taken them.  Block sparsity is left to rows().
bool Planner::some_rows(const Request& r, RowClass of) {
  if (!suits_spans(r) && either_way(r, of)) return true;
  if ((r.sees_all() || r.has_short_window()) && decode(r)) return true;
  // Few KV heads, whose keys clusters share: more than 16 rows by warpgroups, for elsewhere elements of one byte are widened for few
  // rows at a time.
  if (of == RowClass::kFew && tokens(r)) return true;
  if (verify_clusters(r, of) || either_way(r, of)) return true;
  if (has_17_to_64_rows(of) && tokens(r)) return true;
  return (!r.sees_all() && decode(r)) || rows(r, of);
}

// Several query rows of few sequences, whose tables have room for many keys: by a kernel that is clusters or a line, as it finds the
// lengths, or by clusters, and before or after them a line, of which one finds that the lengths are not for it.
bool Planner::either_way(Request r, RowClass rows) {
  const bool is_wide = r.sees_all() && r.max_seq_len > kMostOfFew && !r.a.batch_invariant && d_.overlaps_kernels();
  const bool are_few = r.a.num_tokens * r.group <= 64 * r.a.num_seqs;
  if (!is_wide || r.min_rows > 0 || !r.are_alike() || !are_few || r.heads() > 2 * d_.sms) return false;
  // One sequence has clusters without a line, and one query token of few heads a line of decoding, whatever its pages are; but not
  // where only the device knows that each sequence has one.
  const bool decodes = r.a.cu_query_lens.data == nullptr && r.group <= (r.a.head_size <= 64 ? 4 : 8);
  if (r.a.num_seqs == 1 ? !has_17_to_64_rows(rows) : decodes) return false;
  r.lengths = Lengths::kForClusters;
  return verify_clusters(r, rows) || tokens(r);
}

// By kernels that take calls of any lengths, over any pages.
bool Planner::rows(const Request& r, RowClass rows) {
  if (may_verify(r, rows)) {
    verify(r, rows);
    combine(r);
    return true;
  }
  const bool has_many = has_many_rows(r.kind, r.packed());
  const int head_size = rounded(r.a.head_size);
  const MmaSizes s = mma_sizes(r.kind, head_size, mma_rows(rows, head_size, has_many));
  const KernelId id = r.a.batch_invariant ? KernelId::kMmaInvariant : KernelId::kMma;
  return line(r, {id, head_size, s.rows, r.packed()}, kThreads, s.shared_bytes, s.blocks_of_sm, s.tile,
              mma_tiling(rows, r.a.head_size, has_many));
}

// ---- prompts --------------------------------------------------------------------------------------------------------

// Prefill on Hopper.  mixed: another kernel is to come that runs at the same time, and ends after it.
bool Planner::prefill(const Request& r, bool mixed) {
  const PagedAttentionArgs& a = r.a;
  const bool exact = a.batch_invariant, plain = a.softcap == 0 && a.alibi_slopes == nullptr && a.scale > 0;
  if (r.widens() || !d_.has_warpgroups || r.packed() || a.key.chunk < a.head_size || !plain || r.sparse ||
      (exact && a.head_size > 128)) {
    return false;
  }
  const int head_size = rounded(a.head_size);
  const PrefillSizes s = prefill_sizes(head_size, exact);
  add(step_of(r, {KernelId::kClear}, 1, 1, 1, 0));
  const KernelId id = exact ? KernelId::kPrefillInvariant : KernelId::kPrefill;
  Step step = step_of(r, {id, head_size, s.rows}, grid_of(1), 3 * kThreads, 1, s.shared_bytes);
  step.mixed = mixed;
  add(on_line(step, {s.rows, head_size, 1}, s.tile));
  return true;
}

// Prompts beside sequences of few rows: by prefill and, on other SMs at the same time, by a kernel that is bound by reading: the line of
// verify or, where no sequence is long, four warps for each KV head of a sequence, whose keys nothing cuts.  The device finds which
// sequences are which, and what part of its SMs prefill should have.
bool Planner::mixed(const Request& r) {
  constexpr int kFewRows = 16;
  constexpr int kLineBlocks = 4;            // for each SM: many and short, for they take the SMs that prefill leaves
  constexpr int64_t kFewKeys = 1 << 17;     // of all heads; small calls are over sooner one after the other
  constexpr int64_t kShortSequence = 2048;  // one of 4096 made a call of 48 us 77
  if (r.a.batch_invariant || r.a.head_size > 128 || !may_verify(r, RowClass::kFew)) return false;
  Request prompts = r, few = r;
  prompts.min_rows = few.max_rows = kFewRows;
  const ClusterSizes sizes = cluster_sizes(r.kind, rounded(r.a.head_size), kFewRows, false, false, true);
  const bool is_short = r.max_seq_len <= kShortSequence && suits_loader(r, sizes, false, false);
  if ((!is_short && r.heads() * r.max_seq_len < kFewKeys) || !prefill(prompts, true)) return false;
  const Step& of_prompts = plan_.steps[plan_.count - 1];
  Step& of_few = plan_.steps[plan_.count];
  few.set_rows(kFewRows);
  if (is_short && clusters(few, sizes, {1, sizes.warps / 2})) {
    of_few.early_blocks = 0;  // it does not wait
  } else {
    verify(few, RowClass::kFew);
    of_few.grid = grid_of(kLineBlocks);
    combine(few);
  }
  of_few.mixed = true;
  of_few.pieces_at =
      workspace_places(of_prompts.grid, of_prompts.line.rows, of_prompts.line.pitch, false).end + kCountsBytes;
  return true;
}

// ---- one query token of each sequence -------------------------------------------------------------------------------

bool Planner::decode(const Request& r) {
  const bool invariant = r.a.batch_invariant;
  const int head_size = rounded(r.a.head_size), columns = head_size > 128 || r.group <= 8 ? 8 : 16;
  const LineSizes s = line_sizes(r.kind, head_size, r.packed(), columns, invariant);
  if (!suits_decode(r, s)) return false;
  if (!r.packed() && r.lengths == Lengths::kAny && decode_clusters(r, s)) return true;
  if (!may_prefer_verify(s)) return lines(r, s);
  if (prefers_verify(r, s)) return false;
  if (columns == 8 && may_fold(r, s)) {
    constexpr int64_t kMany = 1024;  // keys; the ends of fewer are dearer
    const Request pairs = r.fold();
    const LineSizes of = line_sizes(r.kind, 128, false, pairs.group > 8 ? 16 : 8, false);
    if (suits_decode(pairs, of) && most_keys(pairs, of.tile()) >= kMany && lines(pairs, of)) return true;
  }
  return lines(r, s);
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
  if (invariant) {
    if (size.blocks == 0) {  // the line comes after them, and the device says which takes the call
      r.lengths = Lengths::kForClusters;
      size = cluster_size(r, usual);
    }
    return r.sees_all() && clusters(r, usual, size);
  }
  if (columns <= 8 && r.has_short_window()) {
    ClusterSizes hiding = usual;
    hiding.hides_keys = true;
    return clusters(r, hiding, cluster_size(r, hiding));
  }
  if (!r.sees_all()) return false;  // clusters of several tokens may take it
  if (columns > 8) return clusters(r, usual, size);
  if (size.blocks == 0 && r.group <= 4 && may_fold(r, of_line) &&
      decode_either(r.fold(), cluster_sizes(r.kind, 128, 8, false, false), line_sizes(r.kind, 128, false, 8, false))) {
    return true;
  }
  if (head_size >= 128 && size.spans == 1) {
    if (decode_either(r, usual, of_line)) return true;
    if (of_line.heads > 1 && r.num_kv_heads % of_line.heads != 0 &&
        decode_either(r, usual, line_sizes(r.kind, head_size, false, columns, false, true))) {
      return true;
    }
  }
  if (head_size == 128) {
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

// ---- several query tokens as columns, and pages of no whole groups of eight tokens ----------------------------------

// Up to 16 rows of short calls and of one-byte caches that verify leaves, and decoding over small pages.
bool Planner::tokens(const Request& r) {
  if (r.packed()) return false;
  const int head_size = rounded(r.a.head_size);
  const int64_t columns = r.tokens() * r.group;  // a sequence's, if all have as many tokens
  if (tokens_clusters(r, head_size, head_size == 64 ? 16 : head_size == 128 && columns > 8 ? 16 : 8)) return true;
  // Elements that are to be widened, on the line.
  if (head_size == 128 && r.widens() && r.lengths != Lengths::kForClusters && !fills_verify(r) &&
      (tokens_line(r, 8) || tokens_line(r, 16))) {
    return true;
  }
  // Decoding over small pages: heads up to 128 in rows of tokens, up to eight in a group.
  if (r.lengths != Lengths::kAny || !is_common(r.kind) || r.a.batch_invariant || head_size > 128) return false;
  const LineSizes s = line_sizes(r.kind, head_size, false, 8, false);
  return suits_decode(r, s, true) && lines(r, s, true);
}

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

// The queries of a sequence as up to 16 columns; of nvfp4 up to twice, for else a warp would leave halves of its tiles in shared
// memory, but not of few KV heads, for one block adds up what all leave.
bool Planner::tokens_line(const Request& r, int columns) {
  const LineSizes s = line_sizes(r.kind, 128, false, columns, false, false, true);
  const int most_tiles = s.raw() && columns == 16 && r.heads() >= d_.sms / 8 ? 2 : 1;
  return ceil_div(r.a.num_tokens, r.a.num_seqs) * r.group <= most_tiles * columns && suits_tokens(r, s) && lines(r, s);
}

// ---- up to 64 query rows by four warps together, on Hopper ----------------------------------------------------------

// Can they multiply so many rows of a KV head?
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

// Few, Some or More rows on the line, where may_verify(); heads of 64 in pairs, if they can be.
void Planner::verify(const Request& r, RowClass rows) {
  const bool pairs = r.widens() && rows != RowClass::kMore && r.can_pair_codes();
  if (pairs) rows = rows == RowClass::kFew ? RowClass::kSome : RowClass::kMore;
  Tiling tiling = tiling_of(rows, r.a.head_size);
  tiling.lead = tiling.rows > 32 ? 5 : 3;  // measured on an H100; it may be 3 to 8
  const VerifySizes s = verify_sizes(r.widens(), pairs ? 128 : rounded(r.a.head_size), tiling.rows, pairs);
  // Pairs have no workspace for more than two blocks.
  line(pairs ? r.fold() : r, {KernelId::kVerifyLine, s.head_size, s.rows}, 2 * kThreads, s.line_bytes, 2, kVerifyTile,
       tiling);
}

// 17 to 64 rows of short calls, if all sequences, as far as the host can tell, have so many tokens that a tile has their rows.  One that
// had far more would keep its cluster busy when the others had finished.
bool Planner::verify_clusters(const Request& r, RowClass rows) {
  if (!has_17_to_64_rows(rows) || !may_verify(r, rows)) return false;
  const bool may_span = suits_spans(r);
  const bool is_short = std::min<int64_t>(r.max_seq_len, int64_t{r.window} + r.tokens()) <= kMostOfFew;
  const bool suits = is_common(r.kind) && r.are_alike() && r.tokens() * r.group <= 64 && r.min_rows == 0;
  if (!suits || !(is_short || r.lengths == Lengths::kForClusters || may_span)) return false;
  const bool many = r.tokens() * r.group > 32;
  const VerifySizes sizes = verify_sizes(r.widens(), rounded(r.a.head_size), many ? 64 : 32, false);
  if (verify_cluster(r, sizes, false, may_span)) return true;
  // Of 64 rows many heads over elements of one byte are quicker by the line, unless keys are few.
  constexpr int64_t kFewKeys = 2048;
  return !may_span && (!many || !r.widens() || r.max_seq_len <= kFewKeys) && verify_cluster(r, sizes, true, false);
}

// ---- anything at all ------------------------------------------------------------------------------------------------

void Planner::simple(const Request& r) {
  constexpr int kRows = 16, kTile = 32;
  const Tiling tiling = simple_tiling(r.a.head_size);
  const auto bytes = [&](int tile) { return (2 * kRows + tile) * (tiling.pitch + 4) * 4; };
  const int limit = d_.shared_of_block - kSimpleOwnBytes, tile = bytes(kTile) > limit ? kTile / 2 : kTile;
  if (bytes(tile) > limit)
    fail(PYKV_NOT_IMPLEMENTED, "%s: query: head_size %d is too large for this GPU", r.a.op, r.a.head_size);
  const int blocks = std::min(resident_blocks(kThreads, bytes(tile) + kSimpleBytes, 4), tiling.blocks_per_sm);
  add(on_line(step_of(r, {KernelId::kSimple}, grid_of(blocks), kThreads, 1, bytes(tile)), tiling, tile));
}

}  // namespace pykv::attention
