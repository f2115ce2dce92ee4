// A call of paged attention as the choice of its kernels sees it, and the functions of that choice.
#pragma once

#include <algorithm>

#include "attention/cuda/plan_sizes.h"

namespace pykv::attention {

constexpr int kAnyRows = 1 << 30;
constexpr int kGroupTokens = 8;       // of a page, that are looked up together
constexpr int kMostWindow = 4096;     // tokens, of which a cluster suffices for each of few KV heads, too
constexpr int64_t kMostOfFew = 8192;  // tokens of a sequence that a cluster takes, where it is not alone

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles, and what a block of them leaves (cuda/plan_tiles.cc).
Tiling simple_tiling(int head_size);
Tiling tiling_of(RowClass rows, int head_size);
RowClass mma_rows(RowClass rows, int head_size, bool has_many);
Tiling mma_tiling(RowClass rows, int head_size, bool has_many = true);
bool uniform_rows(int64_t num_tokens, int64_t num_seqs, int group, int head_size, RowClass& rows);
bool may_be_mixed(RowClass rows, int64_t num_tokens, int64_t num_seqs);
RowClass class_for(RowClass rows, bool batch_invariant);
inline bool has_17_to_64_rows(RowClass rows) { return rows == RowClass::kSome || rows == RowClass::kMore; }

// A call, or that part of it that a launch is to take.
struct Request {
  const PagedAttentionArgs& a;
  int64_t max_seq_len;  // of which no table has room for more
  int num_kv_heads;     // pairs of them, if folded
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
  bool widens() const { return kind != CacheKind::k16Bits; }
  int64_t heads() const { return a.num_seqs * num_kv_heads; }
  // Of each sequence, if as far as the host can tell all have as many.
  int64_t tokens() const { return a.num_tokens / a.num_seqs; }
  bool are_alike() const { return a.num_tokens % a.num_seqs == 0; }

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

  // Two KV heads that lie side by side in rows of tokens can be taken as one (decode/shape.cuh): are they enough for
  // clusters on half the device?
  bool can_fold() const {
    constexpr int64_t kEnough = 16;
    const bool in_rows = a.value.dim == 1 && a.key.chunk >= a.head_size;
    return in_rows && a.key.head == a.head_size && a.value.head == a.head_size && num_kv_heads % 2 == 0 &&
           heads() >= kEnough;
  }
  // ... and are rows of both, if of one byte, whole lines of memory?
  bool can_pair_codes() const { return a.head_size == 64 && can_fold(); }
  Request fold() const {
    Request r = *this;
    r.folded = true;
    r.num_kv_heads /= 2;
    r.group *= 2;
    r.min_rows *= 2;
    r.max_rows = std::min(r.max_rows, 1 << 29) * 2;
    return r;
  }
};

inline int rounded(int head_size) { return head_size <= 64 ? 64 : head_size <= 128 ? 128 : 256; }

// Can decode/loader.cuh bring this cache?  by_token: pages are no whole groups of eight tokens.
inline bool suits_loader(const Request& r, const ColumnSizes& s, bool packed, bool by_token) {
  const PagedAttentionArgs& a = r.a;
  const bool packed_keys = a.key.chunk < a.head_size;
  const int heads = r.folded ? 2 : 1;
  const auto fits = [&](int64_t elements) { return elements >= 0 && elements * s.element_bytes() < int64_t{1} << 32; };
  const bool strides = fits(a.key.block) && fits(a.key.token) && fits(heads * a.key.head) && fits(a.value.block) &&
                       fits(a.value.token) && fits(heads * a.value.head);
  return strides && by_token == (a.block_size % kGroupTokens != 0) && packed_keys == packed &&
         a.num_blocks < (int64_t{1} << 31) && r.max_seq_len < kNoWindow - (1 << 20);
}

inline int64_t most_places(const Request& r, const LineSizes& s) {
  return (r.max_seq_len / s.unit_tokens() + s.lead + 1) * r.num_kv_heads;
}

// Can the line of one query token take this call, whatever the lengths?
inline bool suits_decode(const Request& r, const LineSizes& s, bool by_token = false) {
  return suits_loader(r, s, s.packed, by_token) && !r.a.cu_query_lens.data && r.group <= s.columns &&
         (r.sees_all() || (!s.invariant && !r.sparse)) && r.a.num_seqs * most_places(r, s) < (int64_t{1} << 31);
}

// The same for several tokens of a sequence.
inline bool suits_tokens(const Request& r, const LineSizes& s) {
  return suits_loader(r, s, false, false) && !r.a.batch_invariant && r.group <= s.columns && r.sees_all() &&
         r.min_rows == 0 && (r.a.num_seqs + r.a.num_tokens) * most_places(r, s) < (int64_t{1} << 31);
}

// Keys that a query may see, at most, and as many as fill tiles and blocks.
inline int64_t most_keys(const Request& r, int tile) {
  int64_t most = std::min<int64_t>(r.max_seq_len, int64_t{r.window} + tile);
  if (r.lengths == Lengths::kForClusters) most = std::min(most, kMostOfFew);  // where none is much longer than others
  return most;
}

// Whose line takes a call that may go either way, if its lengths do not suit clusters: that of decoding, of four warps together, or of
// single warps.
enum class LineOf { kDecoding, kVerify, kWarps };

// How many blocks take a KV head of a sequence, or a span of its keys, and their warps; no blocks: better leave it to the line.
struct Clusters {
  int blocks, warps;
  int spans = 1;
};

// Of a block of a cluster: with more keys it widens elements for longer than it waits for them.
constexpr int64_t kManyKeys = 2048;

// Functions that give a bool add steps to the plan or, if the call had better go another way, give false and add none.
class Planner {
 public:
  Planner(const DeviceInfo& device, Plan& plan) : d_(device), plan_(plan) {}

  void all(const Request& r);

 private:
  const DeviceInfo& d_;
  Plan& plan_;

  // cuda/plan.cc
  bool by_tensor_cores(Request r);
  bool some_rows(const Request& r, RowClass of);
  bool either_way(Request r, RowClass rows);
  bool rows(const Request& r, RowClass rows);
  bool prefill(const Request& r, bool mixed = false);
  bool mixed(const Request& r);
  bool decode(const Request& r);
  static bool may_prefer_verify(const LineSizes& s) { return is_common(s.kind) && !s.invariant && !s.packed; }
  static bool may_fold(const Request& r, const LineSizes& s) {
    return may_prefer_verify(s) && s.head_size == 64 && r.a.head_size > 32 && r.sees_all() && r.can_fold();
  }
  bool prefers_verify(const Request& r, const LineSizes& s) const;
  bool decode_clusters(Request r, const LineSizes& of_line);
  bool decode_either(const Request& r, const ClusterSizes& usual, const LineSizes& of_line);
  bool tokens(const Request& r);
  bool tokens_clusters(const Request& given, int head_size, int columns);
  bool tokens_line(const Request& r, int columns);
  bool may_verify(const Request& r, RowClass rows) const;
  bool fills_verify(const Request& r) const;
  void verify(const Request& r, RowClass rows);
  bool verify_clusters(const Request& r, RowClass rows);
  void simple(const Request& r);

  // cuda/plan_steps.cc
  void add(const Step& s);
  static Step step_of(const Request& r, const Instance& instance, int grid, int threads, int cluster, int shared_bytes);
  int grid_of(int blocks_per_sm) const { return std::min(kMaxGrid, d_.sms * blocks_per_sm); }
  int resident_blocks(int threads, int shared_bytes, int by_registers) const;
  int resident_clusters(int blocks, int threads, int shared_bytes, int by_registers) const;
  static Step on_line(Step s, const Tiling& tiling, int unit_tokens);
  bool line(const Request& r, const Instance& instance, int threads, int shared_bytes, int by_registers,
            int unit_tokens, const Tiling& tiling);
  static Tiling line_tiling(const Request& r, const LineSizes& s);
  bool lines(const Request& r, const LineSizes& s, bool by_token = false);
  void combine(const Request& r);
  LineOf line_of(const Request& r) const;
  static Balance balance_for(int kv_heads, float blocks, int grid, float pace, int tokens);
  Balance balance_of(const Request& r, LineOf line, int cluster, int blocks_per_sm) const;
  bool with_line(const Request& r, LineOf line, const Step& clusters);
  Step* clusters_or_line(const Request& r, const ClusterSizes& sizes, const LineSizes& of_line, const Clusters& size,
                         int queries);
  void set_cluster(Step& s, const Request& r, int queries, int quads) const;
  void set_spans(Step& s, int spans, int head_size, int keys_alone) const;
  bool suits_spans(const Request& r) const;
  int invariant_exchange_bytes(const ClusterSizes& s, int group, int blocks, int warps) const;
  int cluster_bytes(const ClusterSizes& s, int group, int blocks, int warps) const;
  int keys_alone(const ClusterSizes& s, int spans, int64_t heads, int round) const;
  int spans_for(const ClusterSizes& s, int64_t most, int blocks, int64_t room, int64_t heads) const;
  Clusters cluster_size(const Request& r, const ClusterSizes& s) const;
  Clusters tokens_size(Request& r, const ClusterSizes& s) const;
  static KernelId cluster_kernel(const ClusterSizes& s, bool spans);
  bool clusters(const Request& r, const ClusterSizes& sizes, const Clusters& size);
  bool verify_cluster(const Request& r, const VerifySizes& sizes, bool alone, bool may_span);
};

}  // namespace pykv::attention
