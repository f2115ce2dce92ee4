// Paged attention on CUDA: which kernels take which sequences.
#include "attention/paged_attention_launch.cuh"
#include "attention/paged_attention_wgmma_tiles.cuh"
#include "cuda/device.h"

namespace pykv::attention {

bool uniform_rows(int64_t num_tokens, int64_t num_seqs, int group, int head_size, RowClass& rows) {
  const auto fits = [&](int limit) { return group <= limit && num_tokens * group <= limit * num_seqs; };
  rows = fits(16) ? RowClass::kFew : head_size <= 128 ? RowClass::kSome : RowClass::kMany;
  if (fits(32)) return true;
  rows = RowClass::kMore;  // poor at single tokens: not for a mean
  return head_size <= 128 && fits(64) && num_tokens % num_seqs == 0;
}

RowClass uniform_rows(const Problem& p) {
  RowClass rows;
  uniform_rows(p.a.num_tokens, p.a.num_seqs, p.group, p.a.head_size, rows);
  return rows;
}

RowClass class_for(RowClass rows, bool batch_invariant, bool short_by_warpgroups, int head_size) {
  if (short_by_warpgroups && rows == RowClass::kSome) return RowClass::kMore;
  if (!batch_invariant) return rows;
  return rows == RowClass::kFew || head_size > 128 ? RowClass::kInvariantFew : RowClass::kInvariantMore;
}

bool may_use_warpgroups(const PagedAttentionArgs& a, RowClass rows, int device) {
  const bool suits_rows = rows == RowClass::kFew || rows == RowClass::kSome || rows == RowClass::kMore;
  const bool suits_cache = a.kv_format != KvFormat::kNvfp4 && a.key.chunk >= a.head_size && a.value.dim == 1;
  return suits_rows && suits_cache && a.head_size <= 128 && a.sparse.vert_stride <= 1 && !a.batch_invariant &&
         has_warpgroups(device);
}

bool fills_warpgroups(const Problem& p, int device) {
  return p.sees_all() && may_use_warpgroups(p.a, RowClass::kFew, device) &&
         p.a.num_seqs * p.a.num_kv_heads >= num_sms(device);
}

bool suits_spans(const Problem& p, int device) {
  const bool is_long = p.a.max_seq_len > kMostOfFew && p.sees_all() && p.min_rows == 0 && p.lengths == Lengths::kAny;
  return is_long && p.a.num_seqs * p.a.num_kv_heads * kFewestSpans * kMostBlocks <= num_sms(device);
}

namespace {

// May several query rows of few sequences, whose tables have room for many keys, go by clusters or a line, as their lengths say?
bool may_go_either_way(const Problem& p, RowClass rows, int device) {
  const bool is_wide = p.sees_all() && p.a.max_seq_len > kMostOfFew && !p.a.batch_invariant && overlaps_kernels(device);
  const bool are_alike = p.min_rows == 0 && p.a.num_tokens % p.a.num_seqs == 0;  // the numbers of query tokens
  const bool are_few = p.a.num_tokens * p.group <= 64 * p.a.num_seqs;
  if (!is_wide || !are_alike || !are_few || p.a.num_seqs * p.a.num_kv_heads > 2 * num_sms(device)) return false;
  // One sequence has clusters without a line, and one query token of few heads a line of decoding, whatever its pages are; but not
  // where only the device knows that each sequence has one.
  const bool decodes = p.a.cu_query_lens.data == nullptr && p.group <= (p.a.head_size <= 64 ? 4 : 8);
  return p.a.num_seqs == 1 ? rows == RowClass::kMore : !decodes;
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

// Of these, the one for the call's kind of cache elements.
template <class F>
F* of_kind(const PagedAttentionArgs& a, F* f16, F* bf16, F* e4m3, F* e5m2, F* int8, F* nvfp4) {
  switch (a.kv_format) {
    case KvFormat::kE4M3:
      return e4m3;
    case KvFormat::kE5M2:
      return e5m2;
    case KvFormat::kInt8:
      return int8;
    case KvFormat::kNvfp4:
      return nvfp4;
    default:
      return a.dtype == DType::kFloat16 ? f16 : bf16;
  }
}

bool launch_decode(const Problem& p, const Launch& launch) {
  return of_kind(p.a, launch_decode_f16, launch_decode_bf16, launch_decode_e4m3, launch_decode_e5m2, launch_decode_int8,
                 launch_decode_nvfp4)(p, launch);
}

bool launch_tokens(const Problem& p, const Launch& launch) {
  return of_kind(p.a, launch_tokens_f16, launch_tokens_bf16, launch_tokens_e4m3, launch_tokens_e5m2, launch_tokens_int8,
                 launch_tokens_nvfp4)(p, launch);
}

bool launch_warpgroup_clusters(const Problem& p, const Launch& launch) {
  using Launcher = bool(const Problem&, const Launch&);
  Launcher* launcher = of_kind<Launcher>(p.a, launch_warpgroup_clusters_f16, launch_warpgroup_clusters_bf16,
                                         launch_warpgroup_clusters_e4m3, nullptr, nullptr, nullptr);
  return launcher && launcher(p, launch);
}

bool launch_warpgroups(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left = nullptr) {
  using Launcher = bool(const Problem&, RowClass, const Launch&, LeftPieces*);
  return of_kind<Launcher>(p.a, launch_warpgroups_f16, launch_warpgroups_bf16, launch_warpgroups_e4m3,
                           launch_warpgroups_e5m2, launch_warpgroups_int8, nullptr)(p, rows, launch, left);
}

// By kernels that take calls of any lengths, over any pages.
bool launch_rows(const Problem& p, RowClass rows, const Launch& launch) {
  if (may_use_warpgroups(p.a, rows, launch.device)) return launch_warpgroups(p, rows, launch);
  return of_kind(p.a, launch_f16, launch_bf16, launch_e4m3, launch_e5m2, launch_int8, launch_nvfp4)(p, rows, launch);
}

bool has_17_to_64_rows(RowClass rows) { return rows == RowClass::kSome || rows == RowClass::kMore; }

// Several query rows of so few KV heads that clusters share their keys: more than 16 rows by warpgroups, for elsewhere elements of
// one byte are widened for few rows at a time.  False if the call had better go another way.
bool launch_for_few_heads(const Problem& p, RowClass rows, const Launch& launch) {
  if (rows == RowClass::kFew) return launch_tokens(p, launch);
  return has_17_to_64_rows(rows) && may_use_warpgroups(p.a, rows, launch.device) &&
         launch_warpgroup_clusters(p, launch);
}

// By a kernel that is clusters or a line, as it finds the lengths, or by clusters, and before or after them a line, of which one finds
// that the lengths are not for it.  False if the call had better go another way.
bool launch_either_way(Problem p, RowClass rows, const Launch& launch) {
  if (!may_go_either_way(p, rows, launch.device)) return false;
  p.lengths = Lengths::kForClusters;
  const bool by_warpgroups = rows != RowClass::kFew && may_use_warpgroups(p.a, rows, launch.device);
  return (by_warpgroups && launch_warpgroup_clusters(p, launch)) || launch_tokens(p, launch);
}

bool launch_prefill(const Problem& p, const Launch& launch) {
  if (p.a.kv_format != KvFormat::kSame) return false;
  if (p.a.batch_invariant) {
    return p.a.dtype == DType::kFloat16 ? launch_exact_wgmma_f16(p, launch) : launch_exact_wgmma_bf16(p, launch);
  }
  return p.a.dtype == DType::kFloat16 ? launch_wgmma_f16(p, launch) : launch_wgmma_bf16(p, launch);
}

bool launch_mma(const Problem& p, RowClass rows, const Launch& launch) {
  const bool from_17_to_64 = has_17_to_64_rows(rows);
  const bool decodes = rows == RowClass::kFew || rows == RowClass::kInvariantFew;
  // Short calls are first asked for in launch_decode if they see all their keys, unless it is the device that finds them short, or
  // those of a short window; those of more rows in launch_warpgroup_clusters, and others in launch_tokens: both know windows.  Long
  // ones with a window are launch_decode's, for its line knows them.  All over pages that are no groups of eight tokens are
  // launch_tokens's, if clusters of warpgroups have not taken them.  Block sparsity is left to launch_rows.
  const bool may_share_keys = suits_spans(p, launch.device);
  if (!may_share_keys && launch_either_way(p, rows, launch)) return true;
  if (decodes && (p.sees_all() || has_short_window(p)) && launch_decode(p, launch)) return true;
  if (may_share_keys && (launch_for_few_heads(p, rows, launch) || launch_either_way(p, rows, launch))) return true;
  const bool by_warpgroups = from_17_to_64 && may_use_warpgroups(p.a, rows, launch.device);
  if (by_warpgroups && launch_warpgroup_clusters(p, launch)) return true;
  if ((rows == RowClass::kFew || from_17_to_64) && launch_tokens(p, launch)) return true;
  if (decodes && !p.sees_all() && launch_decode(p, launch)) return true;
  return launch_rows(p, rows, launch);
}

}  // namespace

void launch_all(Problem p, const Launch& launch) {
  constexpr int kAnyRows = 1 << 30;
  const auto take = [&](RowClass rows, int min_rows, int max_rows) {
    p.min_rows = min_rows;
    p.max_rows = max_rows;
    return launch_mma(p, rows, launch);
  };
  if (suits_mma(p.a)) {
    RowClass rows;
    constexpr int kShort = 256;  // keys
    const bool short_by_warpgroups = p.a.max_seq_len <= kShort && p.a.kv_format == KvFormat::kSame &&
                                     may_use_warpgroups(p.a, RowClass::kMore, launch.device);
    const auto class_of = [&](RowClass x) {
      return class_for(x, p.a.batch_invariant, short_by_warpgroups, p.a.head_size);
    };
    const RowClass many = class_of(RowClass::kMany);
    const auto take_many = [&](int min_rows) {
      p.min_rows = min_rows;
      p.max_rows = kAnyRows;
      return launch_prefill(p, launch) || launch_mma(p, many, launch);
    };
    if (uniform_rows(p.a.num_tokens, p.a.num_seqs, p.group, p.a.head_size, rows)) {
      if (take(class_of(rows), 0, kAnyRows)) return;
    } else if (p.group > 16 || p.a.num_seqs == 1) {
      if (take_many(0)) return;
    } else {
      if (take_many(16) && take(class_of(RowClass::kFew), 0, 16)) return;
    }
  }
  p.min_rows = 0;
  p.max_rows = kAnyRows;
  launch_simple(p, launch);
}

LineOf line_of(const Problem& p, int device) {
  const bool by_warpgroups = may_use_warpgroups(p.a, uniform_rows(p), device);
  const int64_t columns = p.a.num_tokens / p.a.num_seqs * p.group;
  // Where elements are to be widened: up to eight columns are quicker there than by warpgroups.
  const int most = p.a.kv_format == KvFormat::kNvfp4 ? 32 : by_warpgroups ? 8 : 16;
  const bool may_decode = p.a.kv_format != KvFormat::kSame && p.a.head_size > 64 && p.a.head_size <= 128;
  if (p.a.batch_invariant || (may_decode && columns <= most && !fills_warpgroups(p, device))) return LineOf::kDecoding;
  return by_warpgroups ? LineOf::kWarpgroups : LineOf::kWarps;
}

void set_balance(Problem& p, LineOf line, int blocks_per_sm, int device) {
  // Measured on an H100.  Arithmetic, of which one byte and 64 rows have most, is as slow for one block as for all.  Single warps are
  // slow on a line, too, which begins and ends later.
  const bool narrow = p.a.kv_format != KvFormat::kSame, large = p.a.head_size > 128;
  struct Limits {
    float pace;
    int slack;
  };
  Limits limits;
  if (line == LineOf::kWarps) {
    limits = {narrow ? 2.5f : 2.25f, (narrow ? 2200 : 2048) / (large ? 2 : 1)};
  } else {
    const float of_rows = uniform_rows(p) == RowClass::kMore ? 0.75f : 1.f;
    limits = {(narrow ? 1.3f : 2.f) * of_rows / static_cast<float>(p.ways), narrow ? 1920 : 1280};
  }
  if (p.a.batch_invariant) {  // the line has a long sequence in pieces of a chunk, which take a microsecond each
    limits.slack = std::max(limits.slack, (narrow ? 1700 : 900) * p.cluster) / (large ? 4 : 1);
  }
  const float blocks = static_cast<float>(p.cluster) / static_cast<float>(blocks_per_sm);
  p.balance = Balance::of(p.a.num_kv_heads, blocks, num_sms(device), limits.pace, limits.slack);
}

bool launch_line_of(Problem p, LineOf line, const Launch& launch, LeftPieces& left) {
  p.lengths = Lengths::kForLine;
  if (line == LineOf::kWarpgroups) return launch_warpgroups(p, uniform_rows(p), launch, &left);
  if (p.a.batch_invariant) return launch_decode(p, launch);
  return launch_tokens(p, launch) || launch_rows(p, uniform_rows(p), launch);
}

}  // namespace pykv::attention
