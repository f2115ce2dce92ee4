// Query tiles, and the workspace for what blocks leave of them.
#include "attention/cuda/planner.h"

namespace pykv::attention {

namespace {
constexpr int64_t kAlignment = 256;
constexpr int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
}  // namespace

Tiling simple_tiling(int head_size) { return {16, (head_size + 3) / 4 * 4, 4}; }
Tiling tiling_of(RowClass rows, int head_size) {
  const int pitch = rounded(head_size);
  switch (rows) {
    case RowClass::kFew:
    case RowClass::kInvariantFew:
      return {16, pitch, pitch == 64 ? 4 : pitch == 128 ? 3 : 1};
    case RowClass::kSome:
      return {32, pitch, pitch == 64 ? 3 : 2};
    case RowClass::kMany:
      return {pitch == 256 ? 64 : 128, pitch, 2};
    default:
      return {64, pitch, pitch == 256 ? 1 : 2};
  }
}

// The tiles of mma.sync (generic/mma.cuh) for such rows: 64 for fewer, too.  has_many: of caches that are common.
RowClass mma_rows(RowClass rows, int head_size, bool has_many) {
  const bool wide = head_size > 128;
  if (rows == RowClass::kMany) return has_many || wide ? rows : RowClass::kMore;
  if (rows == RowClass::kInvariantFew || rows == RowClass::kInvariantMore) return RowClass::kInvariantMore;
  return wide ? RowClass::kMany : RowClass::kMore;
}
Tiling mma_tiling(RowClass rows, int head_size, bool has_many) {
  const RowClass tile = mma_rows(rows, head_size, has_many);
  Tiling tiling = tiling_of(tile, head_size);
  if (tile != rows && rows != RowClass::kMany) tiling.blocks_per_sm = 1;  // workspaces would be three times as large
  return tiling;
}

// If all sequences have about as few rows, as in decoding, one launch with tiles of that size takes them all.  (It would
// take any: this is a guess from the totals, the lengths being on the device.)
bool uniform_rows(int64_t num_tokens, int64_t num_seqs, int group, int head_size, RowClass& rows) {
  const auto fits = [&](int limit) { return group <= limit && num_tokens * group <= limit * num_seqs; };
  rows = fits(16) ? RowClass::kFew : head_size <= 128 ? RowClass::kSome : RowClass::kMany;
  if (fits(32)) return true;
  rows = RowClass::kMore;  // poor at single tokens: not for a mean
  return head_size <= 128 && fits(64) && num_tokens % num_seqs == 0;
}

// Of uniform rows: are some prompts, and most have few rows?  (Lengths that divide their sum are taken for equal.)
bool may_be_mixed(RowClass rows, int64_t num_tokens, int64_t num_seqs) {
  return rows == RowClass::kSome && num_tokens % num_seqs != 0;
}

// With batch_invariant: tiles that all compute a row in the same steps.
RowClass class_for(RowClass rows, bool batch_invariant) {
  if (!batch_invariant) return rows;
  return rows == RowClass::kFew ? RowClass::kInvariantFew : RowClass::kInvariantMore;
}

WorkspacePlaces workspace_places(int grid, int rows, int pitch, bool batch_invariant) {
  const int64_t all_rows = int64_t{2} * grid * rows, quads = all_rows * (pitch / 4);
  const int64_t stats = align(int64_t{grid} * kNoteBytes);
  if (batch_invariant) return {stats, stats, stats + align(quads * kExactQuadBytes)};  // with statistics of their own
  const int64_t partial = stats + align(all_rows * kStatsBytes);
  return {stats, partial, partial + align(quads * kQuadBytes)};
}

int64_t workspace_bytes(int64_t num_tokens, int64_t num_seqs, int num_heads, int num_kv_heads, int head_size,
                        bool batch_invariant, const DeviceInfo& device) {
  const auto bytes = [&](const Tiling& t) {
    const int grid = std::min(kMaxGrid, device.sms * t.blocks_per_sm);
    return workspace_places(grid, t.rows, t.pitch, batch_invariant).end;
  };
  const int64_t simple = bytes(simple_tiling(head_size));
  const bool warpgroups = head_size <= 128 && !batch_invariant && device.has_warpgroups;  // for all the sizes tell
  RowClass rows;
  const bool uniform = uniform_rows(num_tokens, num_seqs, num_heads / num_kv_heads, head_size, rows);
  if (uniform && !(warpgroups && may_be_mixed(rows, num_tokens, num_seqs))) {
    const bool may_pair = warpgroups && rows == RowClass::kSome;  // heads of 64, which then are 64 rows
    const RowClass tiles = may_pair ? RowClass::kMore : class_for(rows, batch_invariant);
    return std::max({simple, bytes(tiling_of(tiles, head_size)), bytes(mma_tiling(tiles, head_size))});
  }
  const RowClass many = class_for(RowClass::kMany, batch_invariant);
  const int64_t wanted =
      std::max({simple, bytes(tiling_of(RowClass::kFew, head_size)), bytes(tiling_of(many, head_size))});
  // Prefill on Hopper has the same records in fewer, longer tiles, and keeps sums beside them.
  const bool keeps = batch_invariant && head_size <= 128 && device.has_warpgroups;
  return keeps ? wanted + std::min(kMaxGrid, device.sms) * kept_bytes(head_size) : wanted;
}

}  // namespace pykv::attention
