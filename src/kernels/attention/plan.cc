#include "attention/plan.h"

#include <algorithm>
#include <string_view>

#include "attention/plan_sizes.h"
#include "core/error.h"

namespace pykv::attention {
namespace {

constexpr int kAnyRows = 1 << 30;
constexpr int kGroupTokens = 8;       // of a page, that are looked up together
constexpr int kMostWindow = 4096;     // tokens, of which a cluster suffices for each of few KV heads, too
constexpr int64_t kMostOfFew = 8192;  // tokens of a sequence that a cluster takes, where it is not alone
constexpr int64_t kAlignment = 256;
constexpr int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
template <class T>
constexpr int64_t ceil_div(T a, int64_t b) {
  return (a + b - 1) / b;
}

// ---- tiles and the workspace ----------------------------------------------------------------------------------------

Tiling few_rows_tiling(int head_size) {
  return head_size <= 64 ? Tiling{16, 64, 4} : head_size <= 128 ? Tiling{16, 128, 3} : Tiling{16, 256, 1};
}
Tiling simple_tiling(int head_size) { return {16, (head_size + 3) / 4 * 4, 4}; }
Tiling tiling_of(RowClass rows, int head_size) {
  const bool small = head_size <= 64;
  switch (rows) {
    case RowClass::kFew:
    case RowClass::kInvariantFew:
      return few_rows_tiling(head_size);
    case RowClass::kSome:
      return {32, small ? 64 : 128, small ? 3 : 2};
    case RowClass::kMany:
      return small ? Tiling{128, 64, 2} : head_size <= 128 ? Tiling{128, 128, 2} : Tiling{64, 256, 2};
    default:
      return {64, small ? 64 : 128, 2};
  }
}

// The tiles of mma.sync (paged_attention_mma.cuh) for such rows: 64 for fewer, too, and of heads of 256 16 with batch_invariant.
RowClass mma_rows(RowClass rows, int head_size) {
  const bool wide = head_size > 128;
  if (rows == RowClass::kMany) return rows;
  if (rows == RowClass::kInvariantFew || rows == RowClass::kInvariantMore)
    return wide ? RowClass::kInvariantFew : RowClass::kInvariantMore;
  return wide ? RowClass::kMany : RowClass::kMore;
}
Tiling mma_tiling(RowClass rows, int head_size) {
  const RowClass tile = mma_rows(rows, head_size);
  Tiling tiling = tiling_of(tile, head_size);
  if (tile != rows) tiling.blocks_per_sm = 1;  // workspaces would be three times as large
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

// With batch_invariant: tiles that all compute a row in the same steps.  Without it, where sequences are so short that they are
// mostly waits for their queries, tiles of 64 rows do better than those of 32 if four warps multiply together.
RowClass class_for(RowClass rows, bool batch_invariant, bool short_by_warpgroups, int head_size) {
  if (short_by_warpgroups && rows == RowClass::kSome) return RowClass::kMore;
  if (!batch_invariant) return rows;
  return rows == RowClass::kFew || head_size > 128 ? RowClass::kInvariantFew : RowClass::kInvariantMore;
}

bool has_17_to_64_rows(RowClass rows) { return rows == RowClass::kSome || rows == RowClass::kMore; }

// ---- the call ---------------------------------------------------------------------------------------------------------

// A call, or that part of it that a launch is to take.
struct Request {
  PagedAttentionArgs a;
  CacheKind kind;
  int group, window;
  bool sparse, folded;
  int min_rows = 0, max_rows = kAnyRows;
  Lengths lengths = Lengths::kAny;
  int ways = 1;
  int query_rows = 0, tile_heads = 0, tile_tokens = 0, head_tiles = 0;  // where queries are taken in tiles

  bool sees_all() const { return window == kNoWindow && !sparse; }
  bool has_short_window() const { return window <= kMostWindow; }
  bool packed() const { return a.value.dim != 1; }
  int64_t heads() const { return a.num_seqs * a.num_kv_heads; }

  void set_rows(int rows) {
    query_rows = rows;
    tile_heads = std::min(group, rows);
    tile_tokens = rows / tile_heads;
    head_tiles = (group + rows - 1) / rows;
  }

  RowClass rows() const {  // of a call that has such a class
    RowClass rows;
    uniform_rows(a.num_tokens, a.num_seqs, group, a.head_size, rows);
    return rows;
  }

  // Two KV heads that lie side by side in rows of tokens can be taken as one (paged_attention_fold.cuh): are they enough for
  // clusters on half the device?
  bool can_fold() const {
    constexpr int64_t kEnough = 16;
    const bool in_rows = a.value.dim == 1 && a.key.chunk >= a.head_size;
    return in_rows && a.key.head == a.head_size && a.value.head == a.head_size && a.num_kv_heads % 2 == 0 &&
           heads() >= kEnough;
  }
  // ... and are rows of both, if of one byte, whole lines of memory?
  bool can_pair_codes() const { return a.head_size == 64 && can_fold(); }
  Request fold() const {
    Request r = *this;
    r.folded = true;
    r.a.num_kv_heads /= 2;
    r.group *= 2;
    r.min_rows *= 2;
    r.max_rows = std::min(r.max_rows, 1 << 29) * 2;
    return r;
  }
};

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

int rounded(int head_size) { return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256; }

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

// Can paged_attention_decode_load.cuh bring this cache?  by_token: pages are no whole groups of eight tokens.
bool suits_loader(const Request& r, const ColumnSizes& s, bool packed, bool by_token) {
  const PagedAttentionArgs& a = r.a;
  const bool packed_keys = a.key.chunk < a.head_size;
  const int heads = r.folded ? 2 : 1;
  const auto fits = [&](int64_t elements) { return elements >= 0 && elements * s.element_bytes() < int64_t{1} << 32; };
  const bool strides = fits(a.key.block) && fits(a.key.token) && fits(heads * a.key.head) && fits(a.value.block) &&
                       fits(a.value.token) && fits(heads * a.value.head);
  return strides && by_token == (a.block_size % kGroupTokens != 0) && packed_keys == packed &&
         a.num_blocks < (int64_t{1} << 31) && a.max_seq_len < kNoWindow - (1 << 20);
}

int64_t most_places(const Request& r, const LineSizes& s) {
  return (r.a.max_seq_len / s.unit_tokens() + s.lead + 1) * r.a.num_kv_heads;
}

// Can the line of one query token take this call, whatever the lengths?
bool suits_decode(const Request& r, const LineSizes& s, bool by_token = false) {
  return suits_loader(r, s, s.packed, by_token) && !r.a.cu_query_lens.data && r.group <= s.columns &&
         (r.sees_all() || (!s.invariant && !r.sparse)) && r.a.num_seqs * most_places(r, s) < (int64_t{1} << 31);
}

// The same for several tokens of a sequence.
bool suits_tokens(const Request& r, const LineSizes& s) {
  return suits_loader(r, s, false, false) && !r.a.batch_invariant && r.group <= s.columns && r.sees_all() &&
         r.min_rows == 0 && (r.a.num_seqs + r.a.num_tokens) * most_places(r, s) < (int64_t{1} << 31);
}

// Keys that a query may see, at most, and as many as fill tiles and blocks.
int64_t most_keys(const Request& r, int tile) {
  int64_t most = std::min<int64_t>(r.a.max_seq_len, int64_t{r.window} + tile);
  if (r.lengths == Lengths::kForClusters) most = std::min(most, kMostOfFew);  // where none is much longer than others
  return most;
}

// Whose line takes a call that may go either way, if its lengths do not suit clusters: that of decoding, of four warps together, or of
// single warps.
enum class LineOf { kDecoding, kWarpgroups, kWarps };

// How many blocks take a KV head of a sequence, or a span of its keys, and their warps; no blocks: better leave it to the line.
struct Clusters {
  int blocks, warps;
  int spans = 1;
};

class Planner {
 public:
  Planner(const DeviceInfo& device, Plan& plan) : d_(device), plan_(plan) {}

  // Of a call that the tensor-core kernels can take or not.
  void all(Request r) {
    if (suits_mma(r.a)) {
      const int count = plan_.count;
      if (by_tensor_cores(r)) return;
      plan_.count = count;
    }
    simple(r);
  }

 private:
  const DeviceInfo& d_;
  Plan& plan_;

  // ---- launches -----------------------------------------------------------------------------------------------------

  void add(const Step& s) {
    plan_.steps[std::min(plan_.count, Plan::kMost - 1)] = s;
    plan_.count = std::min(plan_.count + 1, Plan::kMost);
  }

  static Step step_of(const Request& r, const Instance& instance, int grid, int threads, int cluster,
                      int shared_bytes) {
    Step s{};
    s.instance = instance;
    s.instance.folded = r.folded;
    s.grid = grid;
    s.threads = threads;
    s.cluster = cluster;
    s.shared_bytes = shared_bytes;
    s.min_rows = r.min_rows;
    s.max_rows = r.max_rows;
    s.lengths = r.lengths;
    s.ways = r.ways;
    s.spans = 1;
    return s;
  }

  int grid_of(int blocks_per_sm) const { return std::min(kMaxGrid, d_.sms * blocks_per_sm); }

  // Blocks of so much shared memory for which an SM has room, if registers have it for so many; one always has.
  int resident_blocks(int threads, int shared_bytes, int by_registers) const {
    const int by_memory = d_.shared_of_sm / ((shared_bytes + 127) / 128 * 128 + 1024);
    return std::max(1, std::min({by_registers, by_memory, d_.threads_of_sm / threads}));
  }

  // Clusters of so many blocks that run at once.
  int resident_clusters(int blocks, int threads, int shared_bytes, int by_registers) const {
    if (shared_bytes > d_.shared_of_block) return 0;
    const int of_sm = resident_blocks(threads, shared_bytes, by_registers);
    if (blocks == 1) return of_sm * d_.sms;
    return d_.overlaps_kernels() ? d_.clusters[std::min(of_sm, 2) - 1][blocks] : 0;
  }

  static Step on_line(Step s, const Tiling& tiling, int unit_tokens) {
    s.line = tiling;
    s.kv_tile = unit_tokens;
    s.query_rows = tiling.tile_rows > 0 ? tiling.tile_rows : tiling.rows;
    return s;
  }

  // On the line.  by_registers: blocks that they leave room for, on an SM.  False if the device has too little shared memory.
  bool line(const Request& r, const Instance& instance, int threads, int shared_bytes, int by_registers,
            int unit_tokens, const Tiling& tiling) {
    if (shared_bytes > d_.shared_of_block) return false;
    const int grid = grid_of(std::min(resident_blocks(threads, shared_bytes, by_registers), tiling.blocks_per_sm));
    add(on_line(step_of(r, instance, grid, threads, 1, shared_bytes), tiling, unit_tokens));
    return true;
  }

  // What adds up what the line before leaves.
  void combine(const Request& r) {
    const bool exact = r.a.batch_invariant;
    add(step_of(r, {exact ? KernelId::kCombineInvariant : KernelId::kCombine}, d_.sms * (exact ? 2 : 4),
                kCombineThreads, 1, 0));
  }

  // Of clusters of so many blocks: what their blocks finish of a tile's queries, and how many of them are there early.
  void set_cluster(Step& s, const Request& r, int queries, int quads) const {
    const int blocks = s.cluster;
    const bool may_be_short = r.a.max_seq_len <= 2048 || r.lengths == Lengths::kForClusters;
    const bool early = d_.overlaps_kernels() && (blocks <= 2 || may_be_short);
    s.early_blocks = early ? 4 * d_.sms : 0;
    s.block_items = (queries * quads + blocks - 1) / blocks;
  }

  // ---- four warps together, on Hopper ---------------------------------------------------------------------------------

  // Can four warps together multiply so many rows of a KV head?
  bool may_use_warpgroups(const Request& r, RowClass rows) const {
    const PagedAttentionArgs& a = r.a;
    const bool suits_rows = rows == RowClass::kFew || has_17_to_64_rows(rows);
    const bool suits_cache = r.kind != CacheKind::kNvfp4 && a.key.chunk >= a.head_size && a.value.dim == 1;
    return suits_rows && suits_cache && a.head_size <= 128 && !r.sparse && !a.batch_invariant && d_.has_warpgroups;
  }

  // ... and are there so many sequences that for few rows, too, this is quicker than the lines of decoding?
  bool fills_warpgroups(const Request& r) const {
    return r.sees_all() && may_use_warpgroups(r, RowClass::kFew) && r.heads() >= d_.sms;
  }

  bool warpgroup_line(const Request& r, RowClass rows, const WarpgroupSizes& s) {
    Tiling tiling = tiling_of(rows, r.a.head_size);
    tiling.lead = s.rows > 32 ? 5 : 3;  // measured on an H100; it may be 3 to 8
    // Pairs have no workspace for more than two blocks.
    return line(r, {KernelId::kWarpgroupLine, s.head_size, s.rows}, 2 * kThreads, s.line_bytes, 2, kWarpgroupTile,
                tiling);
  }

  // Few, Some or More rows, where may_use_warpgroups().
  bool warpgroups(const Request& r, RowClass rows) {
    if (r.kind != CacheKind::k16Bits && rows != RowClass::kMore && r.can_pair_codes()) {  // heads of 64 in pairs
      const bool few = rows == RowClass::kFew;
      return warpgroup_line(r.fold(), few ? RowClass::kSome : RowClass::kMore,
                            warpgroup_sizes(true, 128, few ? 32 : 64, true));
    }
    const int tile_rows = rows == RowClass::kFew ? 16 : rows == RowClass::kSome ? 32 : 64;
    return warpgroup_line(r, rows,
                          warpgroup_sizes(r.kind != CacheKind::k16Bits, rounded(r.a.head_size), tile_rows, false));
  }

  // False if there are more KV heads than find room at once or, where they are to share keys, too many for that.
  bool warpgroup_cluster(const Request& r, const WarpgroupSizes& sizes, bool alone, bool may_span) {
    const int threads = (alone ? 2 : 3) * kThreads, bytes = alone ? sizes.alone_bytes : sizes.cluster_bytes;
    for (int blocks = alone ? 1 : kMostBlocks; blocks > 0; --blocks) {
      const int clusters = resident_clusters(blocks, threads, bytes, alone ? 2 : 1);
      const int64_t heads = r.heads();
      if (heads > clusters) continue;
      const int spans = may_span ? static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans)) : 1;
      if (may_span && (blocks < kMostBlocks || spans < kFewestSpans)) return false;
      const KernelId id = may_span ? KernelId::kWarpgroupSpans
                          : alone  ? KernelId::kWarpgroupBlock
                                   : KernelId::kWarpgroupCluster;
      Request tiles = r;
      tiles.set_rows(sizes.rows);
      Step s = step_of(r, {id, sizes.head_size, sizes.rows}, static_cast<int>(heads * spans * blocks), threads, blocks,
                       bytes);
      s.query_rows = sizes.rows;
      s.kv_tile = kWarpgroupTile;
      set_cluster(s, r, tiles.tile_tokens * tiles.tile_heads, 1);  // a block finishes whole rows
      if (r.lengths != Lengths::kAny) s.balance = balance_of(r, LineOf::kWarpgroups, blocks, alone ? 2 : 1);
      if (may_span) {
        constexpr float kAlone = 4608;  // keys, as quickly by one cluster as by very many; measured on an H100
        s.spans = spans;
        s.pitch = sizes.head_size;
        s.keys_alone = static_cast<int>(kAlone * static_cast<float>(spans) / static_cast<float>(spans - 1));
        s.early_blocks = s.grid;  // the sequence may be short
      }
      return with_line(r, LineOf::kWarpgroups, s);
    }
    return false;
  }

  // Do all sequences, as far as the host can tell, have so many tokens that a tile has `rows` of them, and short keys, unless it is
  // the device that tells or clusters share them?  One that had far more would keep its cluster busy when the others had finished.
  bool suits_warpgroup_clusters(const Request& r, int rows) const {
    const int64_t tokens = r.a.num_tokens / r.a.num_seqs;
    const bool is_short = std::min<int64_t>(r.a.max_seq_len, int64_t{r.window} + tokens) <= kMostOfFew;
    return r.a.num_tokens % r.a.num_seqs == 0 && tokens * r.group <= rows && r.min_rows == 0 &&
           (is_short || r.lengths == Lengths::kForClusters || suits_spans(r));
  }

  // 17 to 64 rows of short calls, where may_use_warpgroups().  False if the call had better go another way.
  bool warpgroup_clusters(const Request& r) {
    if (r.kind != CacheKind::k16Bits && r.kind != CacheKind::kE4M3) return false;
    const int rows = suits_warpgroup_clusters(r, 32) ? 32 : suits_warpgroup_clusters(r, 64) ? 64 : 0;
    if (rows == 0) return false;
    const bool narrow = r.kind != CacheKind::k16Bits, many = rows > 32;
    const WarpgroupSizes sizes = warpgroup_sizes(narrow, rounded(r.a.head_size), rows, false);
    if (suits_spans(r)) return warpgroup_cluster(r, sizes, false, true);
    // Of 64 rows few heads are quicker by clusters beside each other, with half of the rows each; and many over elements of one byte
    // by the line, unless keys are few.
    constexpr int64_t kFewKeys = 2048;
    if (many && r.heads() < d_.sms / (narrow ? 3 : 8)) return false;
    const bool suits_alone = !many || !narrow || r.a.max_seq_len <= kFewKeys;
    return warpgroup_cluster(r, sizes, false, false) || (suits_alone && warpgroup_cluster(r, sizes, true, false));
  }

  // ---- clusters or a line, as the lengths say -------------------------------------------------------------------------

  // Are KV heads so few, in tables with room for many keys, that clusters had better share these?
  bool suits_spans(const Request& r) const {
    const bool is_long = r.a.max_seq_len > kMostOfFew && r.sees_all() && r.min_rows == 0 && r.lengths == Lengths::kAny;
    return is_long && r.heads() * kFewestSpans * kMostBlocks <= d_.sms;
  }

  LineOf line_of(const Request& r) const {
    const bool by_warpgroups = may_use_warpgroups(r, r.rows());
    const int64_t columns = r.a.num_tokens / r.a.num_seqs * r.group;
    // Where elements are to be widened: up to eight columns are quicker there than by warpgroups.
    const int most = r.kind == CacheKind::kNvfp4 ? 32 : by_warpgroups ? 8 : 16;
    const bool may_decode = r.kind != CacheKind::k16Bits && r.a.head_size > 64 && r.a.head_size <= 128;
    if (r.a.batch_invariant || (may_decode && columns <= most && !fills_warpgroups(r))) return LineOf::kDecoding;
    return by_warpgroups ? LineOf::kWarpgroups : LineOf::kWarps;
  }

  // Of clusters of so many blocks, if `grid` blocks run at once.  pace: how much quicker a block is alone than if all are busy.
  // tokens: that a block takes in the time by which the line begins and ends later.
  static Balance balance_for(int kv_heads, float blocks, int grid, float pace, int tokens) {
    return {blocks * pace * static_cast<float>(kv_heads) / static_cast<float>(grid),
            blocks * static_cast<float>(tokens) / Balance::kUnit};
  }

  // When clusters take such a call, if an SM has so many of their blocks.
  Balance balance_of(const Request& r, LineOf line, int cluster, int blocks_per_sm) const {
    // Measured on an H100.  Arithmetic, of which one byte and 64 rows have most, is as slow for one block as for all.  Single warps are
    // slow on a line, too, which begins and ends later.
    const bool narrow = r.kind != CacheKind::k16Bits, large = r.a.head_size > 128;
    float pace = narrow ? 2.5f : 2.25f;
    int slack = (narrow ? 2200 : 2048) / (large ? 2 : 1);
    if (line != LineOf::kWarps) {
      pace = (narrow ? 1.3f : 2.f) * (r.rows() == RowClass::kMore ? 0.75f : 1.f) / static_cast<float>(r.ways);
      slack = narrow ? 1920 : 1280;
    }
    if (r.a.batch_invariant) {  // the line has a long sequence in pieces of a chunk, which take a microsecond each
      slack = std::max(slack, (narrow ? 1700 : 900) * cluster) / (large ? 4 : 1);
    }
    const float blocks = static_cast<float>(cluster) / static_cast<float>(blocks_per_sm);
    return balance_for(r.a.num_kv_heads, blocks, d_.sms, pace, slack);
  }

  // Clusters and, if they are not for all lengths, the line beside them: of warpgroups before them, for they then add up what it
  // leaves, else after them.  False if the call had better go another way.
  bool with_line(const Request& r, LineOf line, const Step& clusters) {
    const int count = plan_.count;
    bool done = true;
    if (r.lengths == Lengths::kAny) {
      add(clusters);
    } else {
      Request of_line = r;
      of_line.lengths = Lengths::kForLine;
      if (line == LineOf::kWarpgroups) {
        done = warpgroups(of_line, r.rows());
        add(clusters);
      } else {
        add(clusters);
        done = r.a.batch_invariant ? decode(of_line) : tokens(of_line) || rows(of_line, r.rows());
      }
      for (int i = count; i < plan_.count; ++i) plan_.steps[i].balance = clusters.balance;
    }
    if (!done) plan_.count = count;
    return done;
  }

  // ---- clusters -------------------------------------------------------------------------------------------------------

  // With batch_invariant, of the exchange: a chunk for each warp, if there is room for so much.  -1: not enough.
  int exact_exchange_bytes(const ClusterSizes& s, int group, int blocks, int warps) const {
    if (blocks * warps == kTeamWarps) return 0;
    const int each = (group * (s.head_size / 4) + blocks - 1) / blocks;
    const int records = blocks == 1 ? 0 : blocks * (each + 1) * kExactQuadBytes;
    const int room = d_.shared_of_block - warps * s.ring_bytes() - s.exact_stats_bytes(warps);
    if (records > room) return -1;
    return std::min(room, std::max(records, blocks * warps * (each + 1) * kLeafBytes));
  }

  // Shared memory of a block; 0: it does not suffice.
  int cluster_bytes(const ClusterSizes& s, int group, int blocks, int warps) const {
    int bytes = s.shared_bytes(warps);
    if (s.invariant) {
      const int exchange = exact_exchange_bytes(s, group, blocks, warps);
      bytes = exchange < 0 ? 0 : warps * s.ring_bytes() + s.exact_stats_bytes(warps) + exchange;
    }
    return bytes <= d_.shared_of_block ? bytes : 0;
  }

  // Up to so many keys a cluster, whose warps have a tile each of `round` keys, is as quick alone as `spans` of them, with half of
  // the device's SMs for all `heads`, for these draw the whole bandwidth; widening is each SM's own affair.  Measured on an H100, us.
  int keys_alone(const ClusterSizes& s, int spans, int64_t heads, int round) const {
    if (s.invariant) return round / s.tile() / 4 * kChunkTokens;  // where each four warps have a chunk
    const float join = 4 + static_cast<float>(s.columns * s.head_size) / static_cast<float>(s.warps * 32 * 8);
    const bool is_slow = s.narrow() || s.raw();
    const float tiles = is_slow ? 0.24f * static_cast<float>(s.warps) : 0.92f;
    const float of_round = tiles * (s.columns <= 8 ? 1.f : s.columns == 16 ? 1.3f : 1.8f);
    const float half = static_cast<float>(d_.sms) / static_cast<float>(2 * kMostBlocks * heads);
    const float quicker = is_slow ? static_cast<float>(spans) : std::min(static_cast<float>(spans), half);
    return static_cast<int>(static_cast<float>(round) * (join / of_round) * quicker / (quicker - 1));
  }

  // How many clusters of so many blocks take a KV head of up to `most` keys, if `room` of them run at once.
  int spans_for(const ClusterSizes& s, int64_t most, int blocks, int64_t room, int64_t heads) const {
    const int64_t clusters = std::min<int64_t>(room, d_.sms / blocks);
    const int spans = static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans));
    if (spans < kFewestSpans) return 1;
    return most > keys_alone(s, spans, heads, blocks * s.warps * s.tile()) ? spans : 1;
  }

  // One block for each SM where keys are few, even where two would find room, for then the next kernel's come up beside it, or two of
  // half the size where there are more sequences than that.  Blocks of other sequences do not help with a long one, hence the limits
  // (in tokens), for nobody knows the lengths here.  Half of the SMs draw the whole bandwidth; fewer blocks than that may lose more than
  // they save, which is some microseconds.
  Clusters cluster_size(const Request& r, const ClusterSizes& s) const {
    constexpr int64_t kMostOfMany = 2048;
    constexpr int64_t kFewKeys = 1536;  // of an SM: of more, two of its blocks are quicker, if clusters are small
    const int64_t heads = r.heads() * r.ways, most = most_keys(r, s.tile());
    const auto room = [&](int blocks) {  // for so many clusters at once
      const int bytes = cluster_bytes(s, r.group, blocks, s.warps);
      const int clusters = bytes == 0 ? 0 : resident_clusters(blocks, s.warps * 32, bytes, s.blocks_of_sm());
      const bool may_double =
          !s.raw() && blocks <= 2 && heads * most > kFewKeys * d_.sms;  // nvfp4 waits for instructions
      return may_double ? clusters : std::min(clusters, d_.sms / blocks);
    };
    for (int blocks = kMostBlocks; blocks > 0; --blocks) {
      if (heads > room(blocks)) continue;
      const bool may_span = s.may_span() && blocks == kMostBlocks && r.lengths == Lengths::kAny;
      const int spans = may_span ? spans_for(s, most, blocks, room(blocks), heads) : 1;
      // nvfp4 keeps its SMs busy: of long sequences four of half the size are quicker, on all SMs.
      if (s.raw() && may_span && spans == 1 && most > 2 * kMostOfFew) {
        constexpr int kHalfBlocks = kMostBlocks / 2;
        const int halves = spans_for(s, most, kHalfBlocks, room(kHalfBlocks), heads);
        if (halves > 1) return {kHalfBlocks, s.warps, halves};
      }
      if (r.a.num_seqs > 1 && most > kMostOfFew && spans == 1) return {0, 0};
      constexpr int64_t kMostElements = 1 << 23;  // of a block's keys, times the blocks that are missing
      const int64_t missing = d_.sms * 4 / 9 - heads * blocks * spans;
      if (missing > 0 && most / (blocks * spans) * s.head_size * missing > kMostElements) return {0, 0};
      return {blocks, s.warps, spans};
    }
    if (r.a.num_seqs > 1 && most > kMostOfFew) return {0, 0};
    const int half = s.invariant ? 4 : s.warps / 2;
    // Of elements that are to be widened, chunks for more than two blocks of an SM are better shared out evenly.
    const bool by_two = s.invariant && s.narrow() && s.head_size == 128;
    // A tile for each warp is enough for windows and one byte that find room at once, of which the line has nothing else to begin, and
    // for nvfp4, whose line has units of eight tiles.
    const bool is_one_wave = (s.narrow() || !r.sees_all()) && heads <= 2 * d_.sms;
    const bool suits = most <= kMostOfMany && most >= (is_one_wave || s.raw() ? 1 : 2) * half * s.tile() &&
                       (!by_two || heads <= 2 * d_.sms) && cluster_bytes(s, r.group, 1, half) > 0;
    return {suits ? 1 : 0, half};
  }

  // Whether it should be one of the wide sizes, `s`, instead: twelve warps where elements are to be widened and keys are so many
  // that 64 SMs are busier with that than with waiting, or where teams of four then take fewer rounds of a chunk each; or blocks
  // of three or four warps where there are more than two for each SM: of three if all of them find room at once.
  Clusters wide_size(const Request& r, const ClusterSizes& s, const Clusters& usual) const {
    const int64_t many = s.invariant ? 4096 : 2048;  // keys of a block
    const int64_t heads = r.heads(), sms = d_.sms;
    if (usual.warps == s.usual_warps()) {
      if (s.invariant) {
        const auto rounds = [&](const Clusters& size) {  // kTeamWarps of them make a long one
          const int64_t together =
              std::max<int64_t>(1, size.blocks * size.warps / kTeamWarps) * size.spans * kChunkTokens;
          return ceil_div(most_keys(r, s.tile()), together);
        };
        const Clusters wide = cluster_size(r, s);
        if (rounds(usual) < kTeamWarps && rounds(wide) < rounds(usual)) return wide;
      }
      const bool is_scaled = s.kind != CacheKind::k16Bits;
      const bool suits = is_scaled && most_keys(r, s.tile()) > many * usual.blocks * usual.spans;
      return suits ? cluster_size(r, s) : Clusters{0, 0};
    }
    if (usual.blocks == 0 || heads <= 2 * sms) return {0, 0};
    return {1, !s.invariant && heads > 3 * sms && heads <= 4 * sms ? 3 : 4};
  }

  static KernelId cluster_kernel(const Request& r, const ClusterSizes& s, bool spans, bool by_token) {
    if (s.invariant) return spans ? KernelId::kInvariantSpans : KernelId::kInvariantCluster;
    if (s.tokens)
      return spans ? KernelId::kTokensSpans : by_token ? KernelId::kSmallPagesCluster : KernelId::kTokensCluster;
    return spans          ? KernelId::kDecodeSpans
           : r.folded     ? KernelId::kFoldedCluster
           : s.hides_keys ? KernelId::kWindowCluster
                          : KernelId::kDecodeCluster;
  }

  // False if the call had better go another way.
  bool clusters(const Request& r, const ClusterSizes& sizes, const Clusters& size, bool by_token = false) {
    const int64_t heads = r.heads() * r.ways, clusters = heads * size.spans, blocks = clusters * size.blocks;
    if (blocks == 0 || blocks >= int64_t{1} << 31) return false;
    const int bytes = cluster_bytes(sizes, r.group, size.blocks, size.warps);
    if (bytes == 0) return false;
    const LineOf line = r.lengths == Lengths::kAny ? LineOf{} : line_of(r);
    const bool spans = size.spans > 1;
    Instance instance{cluster_kernel(r, sizes, spans, by_token), sizes.head_size, sizes.columns};
    instance.wide = sizes.wide;
    instance.spans = spans;
    instance.by_token = by_token;
    Step s = step_of(r, instance, static_cast<int>(blocks), size.warps * 32, size.blocks, bytes);
    set_cluster(s, r, sizes.tokens ? r.tile_tokens * r.tile_heads : r.group, sizes.head_size / (r.folded ? 8 : 4));
    s.query_rows = r.query_rows;
    s.tile_tokens = r.tile_tokens;
    if (r.lengths != Lengths::kAny) s.balance = balance_of(r, line, size.blocks, 1);
    if (sizes.invariant) {
      s.round_chunks = size.blocks * size.warps / kTeamWarps;
      s.exchange_bytes = exact_exchange_bytes(sizes, r.group, size.blocks, size.warps);
    }
    if (spans) {
      s.spans = size.spans;
      s.pitch = sizes.head_size / (r.folded ? 2 : 1);
      s.keys_alone = keys_alone(sizes, size.spans, heads, size.blocks * size.warps * sizes.tile());
      if (d_.overlaps_kernels()) s.early_blocks = static_cast<unsigned>(blocks);  // the sequence may be short
    }
    return with_line(r, line, s);
  }

  // Clusters or, as the device finds the lengths, the line of as many blocks; the caller says how it finds that (balance).  Null if
  // not all clusters would run at once.
  Step* clusters_or_line(const Request& r, const ClusterSizes& sizes, const LineSizes& of_line, const Clusters& size,
                         int queries) {
    const int bytes = std::max(sizes.shared_bytes(sizes.warps), of_line.shared_bytes());
    const int clusters = resident_clusters(size.blocks, size.warps * 32, bytes, 1);
    if (r.heads() > clusters) return nullptr;
    const int grid = clusters * size.blocks;
    const KernelId id = sizes.tokens ? KernelId::kTokensEither
                        : r.folded   ? KernelId::kFoldedEither
                                     : KernelId::kDecodeEither;
    Instance instance{id, sizes.head_size, sizes.columns};
    instance.wide = sizes.wide;
    instance.single = of_line.heads == 1;
    Step s = on_line(step_of(r, instance, grid, size.warps * 32, size.blocks, bytes), line_tiling(r, of_line),
                     of_line.unit_tokens());
    set_cluster(s, r, queries, sizes.head_size / (r.folded ? 8 : 4));
    if (sizes.tokens) s.tile_tokens = r.tile_tokens;
    if (d_.overlaps_kernels()) s.early_blocks = grid;  // its lengths may be short
    add(s);
    return &plan_.steps[plan_.count - 1];
  }

  // ---- one query token ------------------------------------------------------------------------------------------------

  // Of a piece there are more rows than workspaces are made for, but fewer blocks.
  static Tiling line_tiling(const Request& r, const LineSizes& s) {
    Tiling tiling = few_rows_tiling(r.a.head_size);
    tiling.rows = std::max(tiling.rows, s.heads * s.columns);
    tiling.tile_rows = s.columns;
    return tiling;
  }

  // On the line, of a call that suits.  False if the device has too little shared memory.
  bool line_kernel(const Request& r, const LineSizes& s, bool by_token, bool deep = false) {
    const KernelId id = s.tokens      ? KernelId::kTokensLine
                        : s.invariant ? KernelId::kInvariantLine
                        : by_token    ? KernelId::kSmallPagesLine
                        : r.folded    ? KernelId::kFoldedLine
                                      : KernelId::kDecodeLine;
    Instance instance{id, s.head_size, s.columns};
    instance.packed = s.packed;
    instance.deep = deep;
    instance.single = s.heads == 1;
    instance.sees_all = !s.packed && !s.invariant && r.sees_all();
    return line(r, instance, s.warps * 32, s.shared_bytes(), s.blocks_of_sm, s.unit_tokens(), line_tiling(r, s));
  }

  // With KV heads in pairs, if the line takes them so, they are pairs, and blocks have room for them; else one by one.
  bool lines(const Request& r, const LineSizes& s, bool by_token = false) {
    if (s.heads > 1 && r.a.num_kv_heads % s.heads == 0 && line_kernel(r, s, by_token)) return true;
    const LineSizes single = line_sizes(s.kind, s.head_size, s.packed, s.columns, s.invariant, false, true, s.tokens);
    return line_kernel(r, single, by_token);
  }

  // Few sequences whose tables have room for long ones: by one kernel that can be clusters or the line (paged_attention_either.cuh).
  bool decode_either(const Request& r, const ClusterSizes& usual, const LineSizes& of_line) {
    ClusterSizes wide = cluster_sizes(usual.kind, usual.head_size, usual.columns,
                                      usual.head_size == 128 || !usual.narrow(), usual.invariant);
    // By blocks as the line has them, if an SM has one; else by those of clusters, of twelve warps where elements are to be widened.
    const bool as_line = of_line.warps == wide.warps && of_line.blocks_of_sm == 1;
    const ClusterSizes& sizes = as_line || of_line.narrow() ? wide : usual;
    const LineSizes as = as_line ? of_line : line_of_clusters(of_line, sizes);
    constexpr int64_t kAlike = 2048;  // tokens; where no table has room for a page more, clusters lose little
    if (r.a.num_seqs <= 1 || r.a.max_seq_len < kAlike + r.a.block_size || r.a.num_kv_heads % as.heads != 0)
      return false;
    Request in_short_table = r;  // the size of clusters is made for these
    in_short_table.a.max_seq_len = std::min<int64_t>(r.a.max_seq_len, kMostOfFew);
    const Clusters size = cluster_size(in_short_table, sizes);
    if (size.warps != sizes.warps || size.blocks == 0) return false;
    // What a block reads with twice its part of the bandwidth or less, when the others have finished; the line begins and ends later
    // by 5 us and more.  Measured on an H200.
    const int slack_bytes = sizes.narrow() ? 3 << 18 : 1 << 19;
    Step* step = clusters_or_line(r, sizes, as, size, r.group);
    if (!step) return false;
    step->balance = balance_for(r.a.num_kv_heads, static_cast<float>(size.blocks), step->grid, 1,
                                slack_bytes / (2 * sizes.head_size * sizes.element_bytes()));
    return true;
  }

  // Two KV heads as one, in clusters or on the line.
  bool folded(const Request& given, bool on_line) {
    if (given.a.head_size <= 32 || given.group > 8 || !given.can_fold()) return false;
    const Request r = given.fold();
    const int columns = r.group > 8 ? 16 : 8;
    const LineSizes of_line = line_sizes(r.kind, 128, false, columns, false);
    if (on_line) {
      constexpr int64_t kMany = 1024;  // keys; the ends of fewer are dearer
      return suits_decode(r, of_line) && most_keys(r, of_line.tile()) >= kMany && lines(r, of_line);
    }
    const ClusterSizes cluster = cluster_sizes(r.kind, 128, columns, false, false);
    if (columns == 8 && decode_either(r, cluster, of_line)) return true;
    constexpr int64_t kFew = 2048;  // keys, for which 16 columns are no quicker than 8 of a head each
    if (columns > 8 && most_keys(r, cluster.tile()) <= kFew) return false;
    return clusters(r, cluster, cluster_size(r, cluster));
  }

  // Four warps together are quicker for many heads in a group and, over elements of one byte, for sizes of heads between those of
  // tiles, and for pairs of heads of 64 that have nine to sixteen columns.
  bool prefers_warpgroups(const Request& r, const LineSizes& s) const {
    const bool many = s.columns == 16;
    if (s.narrow()) {
      const bool wanted = s.head_size == 64    ? !many && r.group > 4 && r.can_pair_codes()
                          : s.head_size == 128 ? many || r.a.head_size < s.head_size
                                               : false;
      return wanted && fills_warpgroups(r);
    }
    const bool may_suit = s.head_size == 128 ? many : s.head_size == 64 && !many;
    const bool wanted = many || (r.group > 4 && fills_warpgroups(r));
    return may_suit && wanted && r.sees_all() && may_use_warpgroups(r, RowClass::kFew);
  }

  // Few sequences over rows of tokens, by clusters or by a kernel that can be these.
  bool decode_clusters(Request r, const LineSizes& of_line) {
    const int head_size = of_line.head_size, columns = of_line.columns;
    const bool invariant = of_line.invariant;
    if (invariant && columns > 8) return false;  // the records of more queries find no room
    const ClusterSizes usual = cluster_sizes(r.kind, head_size, columns, false, invariant);
    Clusters size = cluster_size(r, usual);
    if (invariant && size.blocks == 0) {  // the line comes after them, and the device says which takes the call
      r.lengths = Lengths::kForClusters;
      size = cluster_size(r, usual);
    }
    if (!invariant && !usual.rare() && r.has_short_window()) {
      ClusterSizes hiding = usual;
      hiding.hides_keys = true;
      return clusters(r, hiding, cluster_size(r, hiding));
    }
    if (!r.sees_all()) return false;  // clusters of several tokens may take it
    if (may_fold(of_line) && folded(r, false)) return true;
    if (!invariant && !usual.rare() && columns <= 8 && head_size >= 128 && size.spans == 1) {
      if (decode_either(r, usual, of_line)) return true;
      // nvfp4 is taken head by head there
      if (of_line.heads > 1 && of_line.narrow() && r.a.num_kv_heads % of_line.heads != 0) {
        if (decode_either(r, usual, line_sizes(r.kind, head_size, false, columns, false, false, true))) return true;
      }
    }
    if (head_size == 128 && columns <= 8) {
      const ClusterSizes wide = cluster_sizes(r.kind, head_size, columns, true, invariant);
      const Clusters of_wide = wide_size(r, wide, size);
      if (of_wide.blocks > 0 && clusters(r, wide, of_wide)) return true;
    }
    return clusters(r, usual, size);
  }

  static bool may_prefer_warpgroups(const LineSizes& s) { return !s.invariant && !s.packed && !s.raw(); }
  static bool may_fold(const LineSizes& s) { return may_prefer_warpgroups(s) && !s.rare() && s.head_size == 64; }

  // One query token for each sequence.  False if the call is not for these kernels.
  bool decode(const Request& r) {
    const bool invariant = r.a.batch_invariant, nvfp4 = r.kind == CacheKind::kNvfp4;
    if (nvfp4 && (invariant || r.packed())) return false;
    const int head_size = rounded(r.a.head_size), columns = head_size > 128 || r.group <= 8 ? 8 : 16;
    const LineSizes s = line_sizes(r.kind, head_size, r.packed(), columns, invariant);
    if (!suits_decode(r, s)) return false;
    if (!r.packed() && r.lengths == Lengths::kAny && decode_clusters(r, s)) return true;
    if (may_prefer_warpgroups(s) && prefers_warpgroups(r, s)) return false;
    if (may_fold(s) && columns == 8 && folded(r, true)) return true;
    if (invariant && columns == 8 && s.narrow() && s.blocks_of_sm == 3) {
      // Long sequences keep more bytes under way, if their elements are widened quickly.  So do four short segments for each SM,
      // of which two blocks have two whole ones each, where three would cut them.
      constexpr int64_t kShort = 1024;  // tokens
      const bool is_quick = r.kind != CacheKind::kInt8;
      if ((is_quick && r.a.max_seq_len > kShort) || (r.heads() > 3 * d_.sms && r.heads() <= 4 * d_.sms))
        return line_kernel(r, line_sizes(r.kind, head_size, r.packed(), columns, true, true), false, true);
    }
    return lines(r, s);
  }

  // ---- several query tokens -------------------------------------------------------------------------------------------

  // Completes `r` but for its clusters, and gives the size of these; no blocks: the call had better go another way.
  Clusters tokens_size(Request& r, const ClusterSizes& s, bool by_token) const {
    constexpr Clusters kNone{0, 0};
    // Of queries: more take longer than the line, unless that widens elements for few rows at a time.
    const int64_t most_tiles = s.shared_queries ? 2 : s.narrow() ? 4 : 1;
    // A guess: all have as many tokens.  One that had far more would keep its cluster busy when the others had finished.
    if (r.a.num_tokens % r.a.num_seqs != 0) return kNone;
    const int64_t tokens = r.a.num_tokens / r.a.num_seqs;
    if (!suits_loader(r, s, false, by_token) || r.a.batch_invariant || r.sparse || r.min_rows > 0) return kNone;
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
    if ((tiles > 1 || s.columns > 16) && size.warps < s.warps) {
      // Blocks of half the size, or tiles one after the other, take longer than the line of warpgroups.
      if (r.sees_all() && may_use_warpgroups(r, RowClass::kMore)) return kNone;
      if (tiles > 1) size = size_for(1);
    }
    const bool two_fit = 2 * (s.shared_bytes(s.warps / 2) + 1024) <= 228 << 10;
    if (!two_fit && size.warps < s.warps) return kNone;  // blocks of half the size, of which an SM should have two
    return size;
  }

  // False if the call had better go another way.
  bool tokens_clusters(const Request& given, int head_size, int columns) {
    const ClusterSizes s = cluster_sizes(given.kind, head_size, columns, false, false, true);
    if (s.rare() || given.lengths == Lengths::kForLine) return false;
    if (has_either(given.kind, head_size, columns) && given.lengths == Lengths::kForClusters) {
      const LineSizes single = line_sizes(given.kind, head_size, false, columns, false, false, true, true);
      const LineSizes of_line = line_of_clusters(single, s);
      Request r = given;
      if (suits_tokens(r, of_line)) {
        const Clusters size = tokens_size(r, s, false);
        const bool suits = size.blocks > 0 && size.warps == s.warps && r.ways == 1;
        Step* step = suits ? clusters_or_line(r, s, of_line, size, r.tile_tokens * r.tile_heads) : nullptr;
        if (step) {
          step->balance = balance_of(r, LineOf::kDecoding, size.blocks, 1);
          return true;
        }
      }
    }
    const bool by_token = !s.raw() && columns <= 16 && given.a.block_size % kGroupTokens != 0;
    Request r = given;
    const Clusters size = tokens_size(r, s, by_token);
    return size.blocks > 0 && clusters(r, s, size, by_token);
  }

  // Of elements that are to be widened: on the line, with the queries of a sequence as up to 16 columns; of nvfp4 up to twice, for
  // else a warp would leave halves of its tiles in shared memory, but not of few KV heads, for one block adds up what all leave.
  bool tokens_line(const Request& r, int columns) {
    const LineSizes s = line_sizes(r.kind, 128, false, columns, false, false, false, true);
    const bool are_many = r.heads() >= d_.sms / 8;
    const int most_tiles = s.raw() && columns == 16 && are_many ? 2 : 1;
    return ceil_div(r.a.num_tokens, r.a.num_seqs) * r.group <= most_tiles * columns && suits_tokens(r, s) &&
           lines(r, s);
  }

  // Decoding over pages that are no groups of eight tokens: heads up to 128 in rows of tokens, up to eight in a group.
  bool small_pages(const Request& r) {
    if (r.kind == CacheKind::kNvfp4 || r.a.batch_invariant || r.a.head_size > 128) return false;
    const LineSizes s = line_sizes(r.kind, rounded(r.a.head_size), false, 8, false);
    return suits_decode(r, s, true) && lines(r, s, true);
  }

  // Up to 64 rows of short calls, up to 16 of one-byte caches that warpgroups leave, and decoding over small pages.  False if the call
  // is not for these kernels.
  bool tokens(const Request& r) {
    if (r.packed()) return false;
    const bool nvfp4 = r.kind == CacheKind::kNvfp4;
    const int64_t columns = r.a.num_tokens / r.a.num_seqs * r.group;  // a sequence's, if all have as many tokens
    const auto by_clusters = [&](int head_size, int tile) { return tokens_clusters(r, head_size, tile); };
    if (r.a.head_size > 128) {
      if (!nvfp4 && columns > 8 && by_clusters(256, 16)) return true;  // nvfp4 would spill
      if (by_clusters(256, 8)) return true;
    } else if (r.a.head_size > 64) {
      if (columns <= 8 ? by_clusters(128, 8) : (columns > 16 && by_clusters(128, 32)) || by_clusters(128, 16))
        return true;
      if (r.kind != CacheKind::k16Bits && r.lengths != Lengths::kForClusters && !fills_warpgroups(r) &&
          (tokens_line(r, 8) || tokens_line(r, 16))) {
        return true;
      }
    } else if ((columns > 16 && by_clusters(64, 32)) || by_clusters(64, 16)) {
      return true;
    }
    return r.lengths == Lengths::kAny && small_pages(r);
  }

  // ---- which of these -------------------------------------------------------------------------------------------------

  // By kernels that take calls of any lengths, over any pages.
  bool rows(const Request& r, RowClass rows) {
    if (may_use_warpgroups(r, rows)) {
      if (!warpgroups(r, rows)) return false;
    } else {
      const RowClass tile = mma_rows(rows, r.a.head_size);
      const MmaSizes s = mma_sizes(r.kind, rounded(r.a.head_size), tile);
      Instance instance{r.a.batch_invariant ? KernelId::kMmaInvariant : KernelId::kMma, rounded(r.a.head_size), s.rows};
      instance.packed = r.packed();
      if (!line(r, instance, kThreads, s.shared_bytes, s.blocks_of_sm, s.unit_tokens(),
                mma_tiling(rows, r.a.head_size)))
        return false;
    }
    combine(r);
    return true;
  }

  // May several query rows of few sequences, whose tables have room for many keys, go by clusters or a line, as their lengths say?
  bool may_go_either_way(const Request& r, RowClass rows) const {
    const bool is_wide = r.sees_all() && r.a.max_seq_len > kMostOfFew && !r.a.batch_invariant && d_.overlaps_kernels();
    const bool are_alike = r.min_rows == 0 && r.a.num_tokens % r.a.num_seqs == 0;  // the numbers of query tokens
    const bool are_few = r.a.num_tokens * r.group <= 64 * r.a.num_seqs;
    if (!is_wide || !are_alike || !are_few || r.heads() > 2 * d_.sms) return false;
    // One sequence has clusters without a line, and one query token of few heads a line of decoding, whatever its pages are; but not
    // where only the device knows that each sequence has one.
    const bool decodes = r.a.cu_query_lens.data == nullptr && r.group <= (r.a.head_size <= 64 ? 4 : 8);
    return r.a.num_seqs == 1 ? rows == RowClass::kMore : !decodes;
  }

  // By a kernel that is clusters or a line, as it finds the lengths, or by clusters, and before or after them a line, of which one finds
  // that the lengths are not for it.  False if the call had better go another way.
  bool either_way(Request r, RowClass rows) {
    if (!may_go_either_way(r, rows)) return false;
    r.lengths = Lengths::kForClusters;
    const bool by_warpgroups = rows != RowClass::kFew && may_use_warpgroups(r, rows);
    return (by_warpgroups && warpgroup_clusters(r)) || tokens(r);
  }

  // Several query rows of so few KV heads that clusters share their keys: more than 16 rows by warpgroups, for elsewhere elements of
  // one byte are widened for few rows at a time.  False if the call had better go another way.
  bool few_heads(const Request& r, RowClass rows) {
    if (rows == RowClass::kFew) return tokens(r);
    return has_17_to_64_rows(rows) && may_use_warpgroups(r, rows) && warpgroup_clusters(r);
  }

  // Short calls are first asked for in decode() if they see all their keys, unless it is the device that finds them short, or
  // those of a short window; those of more rows in warpgroup_clusters(), and others in tokens(): both know windows.  Long ones with a
  // window are decode()'s, for its line knows them.  All over pages that are no groups of eight tokens are tokens()'s, if clusters of
  // warpgroups have not taken them.  Block sparsity is left to rows().
  bool some_rows(const Request& r, RowClass of) {
    const bool from_17_to_64 = has_17_to_64_rows(of);
    const bool decodes = of == RowClass::kFew || of == RowClass::kInvariantFew;
    const bool may_share_keys = suits_spans(r);
    if (!may_share_keys && either_way(r, of)) return true;
    if (decodes && (r.sees_all() || r.has_short_window()) && decode(r)) return true;
    if (may_share_keys && (few_heads(r, of) || either_way(r, of))) return true;
    if (from_17_to_64 && may_use_warpgroups(r, of) && warpgroup_clusters(r)) return true;
    if ((of == RowClass::kFew || from_17_to_64) && tokens(r)) return true;
    if (decodes && !r.sees_all() && decode(r)) return true;
    return rows(r, of);
  }

  // Prefill on Hopper.  False if the call is not for these kernels.
  bool prefill(const Request& r) {
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
    add(on_line(step_of(r, {id, head_size, s.rows}, grid_of(1), 3 * kThreads, 1, s.shared_bytes),
                {s.rows, head_size, 1}, s.tile));
    if (!always_whole(a.max_seq_len, s.tile)) combine(r);
    return true;
  }

  bool by_tensor_cores(Request& r) {
    RowClass rows;
    constexpr int kShort = 256;  // keys
    const bool short_by_warpgroups =
        r.a.max_seq_len <= kShort && r.kind == CacheKind::k16Bits && may_use_warpgroups(r, RowClass::kMore);
    const auto class_of = [&](RowClass x) {
      return class_for(x, r.a.batch_invariant, short_by_warpgroups, r.a.head_size);
    };
    const auto many = [&](int min_rows) {
      r.min_rows = min_rows;
      return prefill(r) || some_rows(r, class_of(RowClass::kMany));
    };
    if (uniform_rows(r.a.num_tokens, r.a.num_seqs, r.group, r.a.head_size, rows)) return some_rows(r, class_of(rows));
    if (r.group > 16 || r.a.num_seqs == 1) return many(0);
    if (!many(16)) return false;
    r.min_rows = 0;
    r.max_rows = 16;
    return some_rows(r, class_of(RowClass::kFew));
  }

  // Anything at all.
  void simple(Request r) {
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
    combine(r);
  }
};

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
  RowClass rows;
  if (uniform_rows(num_tokens, num_seqs, num_heads / num_kv_heads, head_size, rows)) {
    const bool warpgroups = head_size <= 128 && !batch_invariant && device.has_warpgroups;  // for all the sizes tell
    const RowClass tiles = class_for(rows, batch_invariant, warpgroups, head_size);
    return std::max({simple, bytes(tiling_of(tiles, head_size)), bytes(mma_tiling(tiles, head_size))});
  }
  const RowClass many = class_for(RowClass::kMany, batch_invariant, false, head_size);
  const int64_t wanted = std::max({simple, bytes(few_rows_tiling(head_size)), bytes(tiling_of(many, head_size))});
  // Prefill on Hopper has the same records in fewer, longer tiles, and keeps sums beside them.
  const bool keeps = batch_invariant && head_size <= 128 && device.has_warpgroups;
  return keeps ? wanted + std::min(kMaxGrid, device.sms) * kept_bytes(head_size) : wanted;
}

void make_plan(const PagedAttentionArgs& args, const DeviceInfo& device, Plan& plan) {
  plan.count = 0;
  plan.workspace = workspace_bytes(args.num_tokens, args.num_seqs, args.num_heads, args.num_kv_heads, args.head_size,
                                   args.batch_invariant, device);
  Request r{args, kind_of(args.kv_format), args.num_heads / args.num_kv_heads, 0, args.sparse.vert_stride > 1, false};
  r.a.max_seq_len = most_tokens(args);
  r.window = window_of(r.a);
  Planner(device, plan).all(r);
}

}  // namespace pykv::attention
