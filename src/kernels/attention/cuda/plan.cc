// Which kernels take a call: cuda/plan.h says what for.
#include "attention/cuda/plan.h"

#include <string_view>

#include "attention/cuda/planner.h"
#include "core/error.h"

namespace pykv::attention {
namespace {

CacheKind kind_of(KvFormat format) {
  switch (format) {
    case KvFormat::kE4M3:
      return CacheKind::kE4M3;
    case KvFormat::kE5M2:
      return CacheKind::kE5M2;
    case KvFormat::kInt8:
      return CacheKind::kInt8;
    case KvFormat::kNvfp4:
      return CacheKind::kNvfp4;
    default:
      return CacheKind::k16Bits;
  }
}

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

// What is known of a kind of device without asking one; chips of a kind differ in which SMs they lack, and so in how many clusters
// find room.
constexpr DeviceInfo kA100 = {108, 80, false, 163 << 10, 164 << 10, 2048, {}};
constexpr DeviceInfo kHopper = {132,
                                90,
                                true,
                                227 << 10,
                                228 << 10,
                                2048,
                                {{0, 132, 66, 43, 32, 24, 20, 15, 15}, {0, 264, 132, 86, 64, 48, 40, 30, 30}}};

}  // namespace

const DeviceInfo* device_called(const char* name) {
  const std::string_view wanted = name;
  return wanted == "A100" ? &kA100 : wanted == "H100" || wanted == "H200" ? &kHopper : nullptr;
}

// By kernels that take calls of any lengths, over any pages.
bool Planner::rows(const Request& r, RowClass rows) {
  if (may_verify(r, rows)) {
    if (!verify(r, rows)) return false;
    combine(r);
  } else {
    const bool has_many = has_many_rows(r.kind, r.packed());
    const RowClass tile = mma_rows(rows, r.a.head_size, has_many);
    const MmaSizes s = mma_sizes(r.kind, rounded(r.a.head_size), tile);
    Instance instance{r.a.batch_invariant ? KernelId::kMmaInvariant : KernelId::kMma, rounded(r.a.head_size), s.rows};
    instance.packed = r.packed();
    if (!line(r, instance, kThreads, s.shared_bytes, s.blocks_of_sm, s.tile, mma_tiling(rows, r.a.head_size, has_many)))
      return false;
  }
  return true;
}

// May several query rows of few sequences, whose tables have room for many keys, go by clusters or a line, as their lengths say?
bool Planner::may_go_either_way(const Request& r, RowClass rows) const {
  const bool is_wide = r.sees_all() && r.max_seq_len > kMostOfFew && !r.a.batch_invariant && d_.overlaps_kernels();
  const bool are_alike = r.min_rows == 0 && r.a.num_tokens % r.a.num_seqs == 0;  // the numbers of query tokens
  const bool are_few = r.a.num_tokens * r.group <= 64 * r.a.num_seqs;
  if (!is_wide || !are_alike || !are_few || r.heads() > 2 * d_.sms) return false;
  // One sequence has clusters without a line, and one query token of few heads a line of decoding, whatever its pages are; but not
  // where only the device knows that each sequence has one.
  const bool decodes = r.a.cu_query_lens.data == nullptr && r.group <= (r.a.head_size <= 64 ? 4 : 8);
  return r.a.num_seqs == 1 ? has_17_to_64_rows(rows) : !decodes;
}

// By a kernel that is clusters or a line, as it finds the lengths, or by clusters, and before or after them a line, of which one finds
// that the lengths are not for it.  Returns false if these kernels do not suit the call.
bool Planner::either_way(Request r, RowClass rows) {
  if (!may_go_either_way(r, rows)) return false;
  r.lengths = Lengths::kForClusters;
  const bool by_verify = rows != RowClass::kFew && may_verify(r, rows);
  return (by_verify && verify_clusters(r)) || tokens(r);
}

// Several query rows of so few KV heads that clusters share their keys: more than 16 rows by warpgroups, for elsewhere elements of
// one byte are widened for few rows at a time.  Returns false if these kernels do not suit the call.
bool Planner::few_heads(const Request& r, RowClass rows) {
  if (rows == RowClass::kFew) return tokens(r);
  return has_17_to_64_rows(rows) && may_verify(r, rows) && verify_clusters(r);
}

// Short calls are first asked for in decode() if they see all their keys, unless it is the device that finds them short, or
// those of a short window; those of more rows in verify_clusters(), and others in tokens(): both know windows.  Long ones with a
// window are decode()'s, for its line knows them.  All over pages that are no groups of eight tokens are tokens()'s, if clusters of
// warpgroups have not taken them.  Block sparsity is left to rows().
bool Planner::some_rows(const Request& r, RowClass of) {
  const bool from_17_to_64 = has_17_to_64_rows(of);
  const bool decodes = of == RowClass::kFew || of == RowClass::kInvariantFew;
  const bool may_share_keys = suits_spans(r);
  if (!may_share_keys && either_way(r, of)) return true;
  if (decodes && (r.sees_all() || r.has_short_window()) && decode(r)) return true;
  if (may_share_keys && (few_heads(r, of) || either_way(r, of))) return true;
  if (from_17_to_64 && may_verify(r, of) && verify_clusters(r)) return true;
  if ((of == RowClass::kFew || from_17_to_64) && tokens(r)) return true;
  if (decodes && !r.sees_all() && decode(r)) return true;
  return rows(r, of);
}

// Prefill on Hopper.  mixed: another kernel is to come that runs at the same time, and then what adds up what both leave.  Returns
// false if these kernels do not suit the call.
bool Planner::prefill(const Request& r, bool mixed) {
  const PagedAttentionArgs& a = r.a;
  const bool exact = a.batch_invariant, plain = a.softcap == 0 && a.alibi_slopes == nullptr && a.scale > 0;
  if (r.kind != CacheKind::k16Bits || !d_.has_warpgroups || r.packed() || a.key.chunk < a.head_size || !plain ||
      r.sparse || (exact && a.head_size > 128)) {
    return false;
  }
  const int head_size = rounded(a.head_size);
  const PrefillSizes s = prefill_sizes(head_size, exact);
  add(step_of(r, {KernelId::kClear}, 1, 1, 1, 0));
  const KernelId id = exact ? KernelId::kPrefillInvariant : KernelId::kPrefill;
  add(on_line(step_of(r, {id, head_size, s.rows}, grid_of(1), 3 * kThreads, 1, s.shared_bytes), {s.rows, head_size, 1},
              s.tile));
  plan_.steps[plan_.count - 1].mixed = mixed;
  return true;
}

// Prompts beside sequences of few rows: by prefill and, on other SMs at the same time, by verify, which is bound by reading.  The device
// finds which sequences are which, and what part of its SMs prefill should have.  Returns false if these kernels do not suit the call.
bool Planner::mixed(const Request& r) {
  constexpr int kFewRows = 16;
  constexpr int kLineBlocks = 4;         // for each SM: many and short, for they take the SMs that prefill leaves
  constexpr int64_t kFewKeys = 1 << 17;  // of all heads; small calls are over sooner one after the other
  const bool suits = !r.a.batch_invariant && r.a.head_size <= 128 && may_verify(r, RowClass::kFew);
  if (!suits || r.heads() * r.max_seq_len < kFewKeys) return false;
  const int count = plan_.count;
  Request prompts = r, few = r;
  prompts.min_rows = few.max_rows = kFewRows;
  if (!prefill(prompts, true) || !verify(few, RowClass::kFew)) {
    plan_.count = count;
    return false;
  }
  Step* steps = &plan_.steps[plan_.count - 2];
  steps[1].mixed = true;
  steps[1].grid = grid_of(kLineBlocks);
  steps[1].pieces_at =
      workspace_places(steps[0].grid, steps[0].line.rows, steps[0].line.pitch, false).end + kCountsBytes;
  combine(few);
  return true;
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

// Anything at all.
void Planner::simple(Request r) {
  constexpr int kRows = 16, kTile = 32;
  r.min_rows = 0;
  r.max_rows = kAnyRows;
  const Tiling tiling = simple_tiling(r.a.head_size);
  const auto bytes = [&](int tile) { return (2 * kRows + tile) * (tiling.pitch + 4) * 4; };
  const int limit = d_.shared_of_block - kSimpleOwnBytes, tile = bytes(kTile) > limit ? kTile / 2 : kTile;
  if (bytes(tile) > limit)
    fail(PYKV_NOT_IMPLEMENTED, "%s: query: head_size %d is too large for this GPU", r.a.op, r.a.head_size);
  const int blocks = std::min(resident_blocks(kThreads, bytes(tile) + kSimpleBytes, 4), tiling.blocks_per_sm);
  add(on_line(step_of(r, {KernelId::kSimple}, grid_of(blocks), kThreads, 1, bytes(tile)), tiling, tile));
}

// Of a call that the tensor-core kernels can take or not.
void Planner::all(const Request& r) {
  if (suits_mma(r.a)) {
    const int count = plan_.count;
    if (by_tensor_cores(r)) return;
    plan_.count = count;
  }
  simple(r);
}

void make_plan(const PagedAttentionArgs& args, const DeviceInfo& device, Plan& plan) {
  plan.count = 0;
  plan.workspace = workspace_bytes(args.num_tokens, args.num_seqs, args.num_heads, args.num_kv_heads, args.head_size,
                                   args.batch_invariant, device);
  const int group = args.num_heads / args.num_kv_heads, window = window_of(args);
  const bool sparse = args.sparse.vert_stride > 1;
  const Request r{args, most_tokens(args), args.num_kv_heads, kind_of(args.kv_format), group, window, sparse, false};
  Planner(device, plan).all(r);
}

}  // namespace pykv::attention
