// Steps of a plan: with how many blocks of what sizes a kernel takes a call, and how many KV heads' keys clusters of them share.
#include "attention/cuda/planner.h"

namespace pykv::attention {

void Planner::add(const Step& s) {
  plan_.steps[std::min(plan_.count, Plan::kMost - 1)] = s;
  plan_.count = std::min(plan_.count + 1, Plan::kMost);
}

Step Planner::step_of(const Request& r, const Instance& instance, int grid, int threads, int cluster,
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

// Blocks of so much shared memory for which an SM has room, if registers have it for so many; one always has.
int Planner::resident_blocks(int threads, int shared_bytes, int by_registers) const {
  const int by_memory = d_.shared_of_sm / ((shared_bytes + 127) / 128 * 128 + 1024);
  return std::max(1, std::min({by_registers, by_memory, d_.threads_of_sm / threads}));
}

// Clusters of so many blocks that run at once.
int Planner::resident_clusters(int blocks, int threads, int shared_bytes, int by_registers) const {
  if (shared_bytes > d_.shared_of_block) return 0;
  const int of_sm = resident_blocks(threads, shared_bytes, by_registers);
  if (blocks == 1) return of_sm * d_.sms;
  return d_.overlaps_kernels() ? d_.clusters[std::min(of_sm, 2) - 1][blocks] : 0;
}

// ---- lines ----------------------------------------------------------------------------------------------------------

Step Planner::on_line(Step s, const Tiling& tiling, int unit_tokens) {
  s.line = tiling;
  s.kv_tile = unit_tokens;
  s.query_rows = tiling.tile_rows > 0 ? tiling.tile_rows : tiling.rows;
  return s;
}

// by_registers: blocks that they leave room for, on an SM.  Returns false if the device has too little shared memory.
bool Planner::line(const Request& r, const Instance& instance, int threads, int shared_bytes, int by_registers,
                   int unit_tokens, const Tiling& tiling) {
  if (shared_bytes > d_.shared_of_block) return false;
  const int grid = grid_of(std::min(resident_blocks(threads, shared_bytes, by_registers), tiling.blocks_per_sm));
  add(on_line(step_of(r, instance, grid, threads, 1, shared_bytes), tiling, unit_tokens));
  return true;
}

// Of a piece there are more rows than workspaces are made for, but fewer blocks.
Tiling Planner::line_tiling(const Request& r, const LineSizes& s) {
  Tiling tiling = tiling_of(RowClass::kFew, r.a.head_size);
  tiling.rows = std::max(tiling.rows, s.heads * s.columns);
  tiling.tile_rows = s.columns;
  return tiling;
}

// The line of decoding or of several tokens: with KV heads in pairs, if it takes them so, they are pairs, and blocks have room for
// them; else one by one.
bool Planner::lines(const Request& r, const LineSizes& s, bool by_token) {
  const bool suits = has_line(s) && (s.heads == 1 || r.num_kv_heads % s.heads == 0);
  const KernelId id = s.tokens      ? KernelId::kTokensLine
                      : s.invariant ? KernelId::kInvariantLine
                      : by_token    ? KernelId::kSmallPagesLine
                      : r.folded    ? KernelId::kFoldedLine
                                    : KernelId::kDecodeLine;
  Instance instance{id, s.head_size, s.columns, s.packed};
  instance.single = s.heads == 1;
  if (suits && line(r, instance, s.warps * 32, s.shared_bytes(), s.blocks_of_sm, s.unit_tokens(), line_tiling(r, s)))
    return true;
  return s.heads > 1 &&
         lines(r, line_sizes(s.kind, s.head_size, s.packed, s.columns, s.invariant, true, s.tokens), by_token);
}

// What adds up what the line before leaves.
void Planner::combine(const Request& r) { add(step_of(r, {KernelId::kCombine}, d_.sms * 4, kCombineThreads, 1, 0)); }

// ---- clusters or a line, as the device finds the lengths ------------------------------------------------------------

LineOf Planner::line_of(const Request& r) const {
  const bool by_verify = may_verify(r, r.rows());
  // Where elements are to be widened: up to eight columns are quicker there than by warpgroups.
  const int most = by_verify ? 8 : 16;
  const bool may_decode = r.widens() && r.a.head_size > 64 && r.a.head_size <= 128;
  if (r.a.batch_invariant || (may_decode && r.tokens() * r.group <= most && !fills_verify(r))) return LineOf::kDecoding;
  return by_verify ? LineOf::kVerify : LineOf::kWarps;
}

// Of clusters of so many blocks, if `grid` blocks run at once.  pace: how much quicker a block is alone than if all are busy.
// tokens: that a block takes in the time by which the line begins and ends later.
Balance Planner::balance_for(int kv_heads, float blocks, int grid, float pace, int tokens) {
  return {blocks * pace * static_cast<float>(kv_heads) / static_cast<float>(grid),
          blocks * static_cast<float>(tokens) / Balance::kUnit};
}

// When clusters take such a call, if an SM has so many of their blocks.
Balance Planner::balance_of(const Request& r, LineOf line, int cluster, int blocks_per_sm) const {
  // Measured on an H100.  Arithmetic, of which one byte and 64 rows have most, is as slow for one block as for all.  Single warps are
  // slow on a line, too, which begins and ends later.
  const bool narrow = r.widens(), large = r.a.head_size > 128;
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
  return balance_for(r.num_kv_heads, blocks, d_.sms, pace, slack);
}

// Clusters and, if they are not for all lengths, the line beside them: of warpgroups before them, and what adds up its pieces after
// them, else after them.  Returns false if these kernels do not suit the call.
bool Planner::with_line(const Request& r, LineOf line, const Step& clusters) {
  const int count = plan_.count;
  bool done = true;
  Request of_line = r;
  of_line.lengths = Lengths::kForLine;
  if (r.lengths == Lengths::kAny) {
    add(clusters);
  } else if (line == LineOf::kVerify) {
    verify(of_line, r.rows());
    add(clusters);
    combine(of_line);
  } else {
    add(clusters);
    done = r.a.batch_invariant ? decode(of_line) : tokens(of_line) || rows(of_line, r.rows());
  }
  for (int i = count; i < plan_.count; ++i) plan_.steps[i].balance = clusters.balance;
  if (!done) plan_.count = count;
  return done;
}

// Clusters or, as the device finds the lengths, the line of as many blocks; the caller says how it finds that (balance).  Null if
// not all clusters would run at once.
Step* Planner::clusters_or_line(const Request& r, const ClusterSizes& sizes, const LineSizes& of_line,
                                const Clusters& size, int queries) {
  const int bytes = std::max(sizes.shared_bytes(sizes.warps), of_line.shared_bytes());
  const int clusters = resident_clusters(size.blocks, size.warps * 32, bytes, 1);
  if (r.heads() > clusters) return nullptr;
  const int grid = clusters * size.blocks;
  const KernelId id = sizes.tokens ? KernelId::kTokensEither
                      : r.folded   ? KernelId::kFoldedEither
                                   : KernelId::kDecodeEither;
  Instance instance{id, sizes.head_size, sizes.columns};
  instance.single = of_line.heads == 1;
  Step s = on_line(step_of(r, instance, grid, size.warps * 32, size.blocks, bytes), line_tiling(r, of_line),
                   of_line.unit_tokens());
  set_cluster(s, r, queries, sizes.head_size / (r.folded ? 8 : 4));
  if (sizes.tokens) s.tile_tokens = r.tile_tokens;
  if (d_.overlaps_kernels()) s.early_blocks = grid;  // its lengths may be short
  add(s);
  return &plan_.steps[plan_.count - 1];
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// Of clusters of so many blocks: what their blocks finish of a tile's queries, and how many of them are there early.
void Planner::set_cluster(Step& s, const Request& r, int queries, int quads) const {
  const int blocks = s.cluster;
  const bool may_be_short = r.max_seq_len <= 2048 || r.lengths == Lengths::kForClusters;
  const bool early = d_.overlaps_kernels() && (blocks <= 2 || may_be_short);
  s.early_blocks = early ? 4 * d_.sms : 0;
  s.block_items = (queries * quads + blocks - 1) / blocks;
}

// So many of them share the keys of a KV head, unless these are not more than keys_alone.
void Planner::set_spans(Step& s, int spans, int head_size, int keys_alone) const {
  s.spans = spans;
  s.pitch = head_size;
  s.keys_alone = keys_alone;
  if (d_.overlaps_kernels()) s.early_blocks = static_cast<unsigned>(s.grid);  // the sequence may be short
}

// Are KV heads so few, in tables with room for many keys, that clusters had better share these?
bool Planner::suits_spans(const Request& r) const {
  const bool is_long = r.max_seq_len > kMostOfFew && r.sees_all() && r.min_rows == 0 && r.lengths == Lengths::kAny;
  return is_long && r.heads() * kFewestSpans * kMostBlocks <= d_.sms;
}

// With batch_invariant, of the exchange: a chunk for each warp, if there is room for so much.  -1: not enough.
int Planner::invariant_exchange_bytes(const ClusterSizes& s, int group, int blocks, int warps) const {
  if (blocks * warps == kTeamWarps) return 0;
  const int each = (group * (s.head_size / 4) + blocks - 1) / blocks;
  const int records = blocks == 1 ? 0 : blocks * (each + 1) * kExactQuadBytes;
  const int room = d_.shared_of_block - warps * s.ring_bytes() - s.exact_stats_bytes(warps);
  if (records > room) return -1;
  return std::min(room, std::max(records, blocks * warps * (each + 1) * kLeafBytes));
}

// Shared memory of a block; 0: it does not suffice.
int Planner::cluster_bytes(const ClusterSizes& s, int group, int blocks, int warps) const {
  int bytes = s.shared_bytes(warps);
  if (s.invariant) {
    const int exchange = invariant_exchange_bytes(s, group, blocks, warps);
    bytes = exchange < 0 ? 0 : warps * s.ring_bytes() + s.exact_stats_bytes(warps) + exchange;
  }
  return bytes <= d_.shared_of_block ? bytes : 0;
}

// Up to so many keys a cluster, whose warps have a tile each of `round` keys, is as quick alone as `spans` of them, with half of
// the device's SMs for all `heads`, for these draw the whole bandwidth; widening is each SM's own affair.  Measured on an H100, us.
int Planner::keys_alone(const ClusterSizes& s, int spans, int64_t heads, int round) const {
  if (s.invariant) return round / s.tile() / 4 * kChunkTokens;  // where each four warps have a chunk
  const float join = 4 + static_cast<float>(s.columns * s.head_size) / static_cast<float>(s.warps * 32 * 8);
  const float tiles = s.narrow() ? 0.24f * static_cast<float>(s.warps) : 0.92f;
  const float of_round = tiles * (s.columns <= 8 ? 1.f : 1.3f);
  const float half = static_cast<float>(d_.sms) / static_cast<float>(2 * kMostBlocks * heads);
  const float quicker = s.narrow() ? static_cast<float>(spans) : std::min(static_cast<float>(spans), half);
  return static_cast<int>(static_cast<float>(round) * (join / of_round) * quicker / (quicker - 1));
}

// How many clusters of so many blocks take a KV head of up to `most` keys, if `room` of them run at once.
int Planner::spans_for(const ClusterSizes& s, int64_t most, int blocks, int64_t room, int64_t heads) const {
  const int64_t clusters = std::min<int64_t>(room, d_.sms / blocks);
  const int spans = static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans));
  if (spans < kFewestSpans) return 1;
  return most > keys_alone(s, spans, heads, blocks * s.warps * s.tile()) ? spans : 1;
}

// One block for each SM where keys are few, even where two would find room, for then the next kernel's come up beside it, or two of
// half the size where there are more sequences than that.  Blocks of other sequences do not help with a long one, hence the limits
// (in tokens), for nobody knows the lengths here.  Half of the SMs draw the whole bandwidth; fewer blocks than that may lose more than
// they save, which is some microseconds.
Clusters Planner::cluster_size(const Request& r, const ClusterSizes& s) const {
  constexpr int64_t kMostOfMany = 2048;
  constexpr int64_t kFewKeys = 1536;  // of an SM: of more, two of its blocks are quicker, if clusters are small
  const int64_t heads = r.heads() * r.ways, most = most_keys(r, s.tile());
  const bool is_long = r.a.num_seqs > 1 && most > kMostOfFew;
  const auto room = [&](int blocks) {  // for so many clusters at once
    const int bytes = cluster_bytes(s, r.group, blocks, s.warps);
    const int clusters = bytes == 0 ? 0 : resident_clusters(blocks, s.warps * 32, bytes, s.blocks_of_sm());
    const bool may_double = blocks <= 2 && heads * most > kFewKeys * d_.sms;
    return may_double ? clusters : std::min(clusters, d_.sms / blocks);
  };
  for (int blocks = kMostBlocks; blocks > 0; --blocks) {
    if (heads > room(blocks)) continue;
    const bool may_span = s.may_span() && blocks == kMostBlocks && r.lengths == Lengths::kAny;
    const int spans = may_span ? spans_for(s, most, blocks, room(blocks), heads) : 1;
    if (is_long && spans == 1) return {0, 0};
    constexpr int64_t kMostElements = 1 << 23;  // of a block's keys, times the blocks that are missing
    const int64_t missing = d_.sms * 4 / 9 - heads * blocks * spans;
    if (missing > 0 && most / (blocks * spans) * s.head_size * missing > kMostElements) return {0, 0};
    return {blocks, s.warps, spans};
  }
  if (is_long) return {0, 0};
  const int half = s.invariant ? 4 : s.warps / 2;
  // Of elements that are to be widened, chunks for more than two blocks of an SM are better shared out evenly.
  const bool by_two = s.invariant && s.narrow() && s.head_size == 128;
  // A tile for each warp is enough for windows and one byte that find room at once, of which the line has nothing else to begin.
  const bool is_one_wave = (s.narrow() || !r.sees_all()) && heads <= 2 * d_.sms;
  const bool suits = most <= kMostOfMany && most >= (is_one_wave ? 1 : 2) * half * s.tile() &&
                     (!by_two || heads <= 2 * d_.sms) && cluster_bytes(s, r.group, 1, half) > 0;
  return {suits ? 1 : 0, half};
}

// The same for several tokens; completes `r` but for its clusters.
Clusters Planner::tokens_size(Request& r, const ClusterSizes& s) const {
  constexpr Clusters kNone{0, 0};
  // Of queries: more take longer than the line, unless that widens elements for few rows at a time.
  const int64_t most_tiles = s.narrow() ? 4 : s.head_size > 128 ? 2 : 1;
  // A guess: all have as many tokens.  One that had far more would keep its cluster busy when the others had finished.
  if (!r.are_alike() || !suits_loader(r, s, false, s.by_token) || r.a.batch_invariant || r.sparse || r.min_rows > 0)
    return kNone;
  r.set_rows(s.columns);
  r.tile_tokens = static_cast<int>(std::min<int64_t>(r.tile_tokens, r.tokens()));
  const int64_t tiles = ceil_div(r.tokens(), r.tile_tokens) * r.head_tiles;
  if (tiles > most_tiles || (tiles > 1 && most_keys(r, s.tile()) > kMostOfFew)) return kNone;
  // Clusters beside each other read the same keys at about the same time, so that only one reads them from memory.
  r.ways = static_cast<int>(tiles);
  Clusters size = cluster_size(r, s);
  if (tiles > 1 && size.warps < s.warps) {
    // Blocks of half the size, or tiles one after the other, take longer than the line of warpgroups.
    if (r.sees_all() && may_verify(r, RowClass::kMore)) return kNone;
    r.ways = 1;
    size = cluster_size(r, s);
  }
  const bool two_fit = 2 * (s.shared_bytes(s.warps / 2) + 1024) <= 228 << 10;
  if (!two_fit && size.warps < s.warps) return kNone;  // blocks of half the size, of which an SM should have two
  return size;
}

KernelId Planner::cluster_kernel(const ClusterSizes& s, bool spans) {
  if (s.invariant) return spans ? KernelId::kInvariantSpans : KernelId::kInvariantCluster;
  if (s.tokens)
    return spans ? KernelId::kTokensSpans : s.by_token ? KernelId::kSmallPagesCluster : KernelId::kTokensCluster;
  return spans ? KernelId::kDecodeSpans : s.hides_keys ? KernelId::kWindowCluster : KernelId::kDecodeCluster;
}

// Returns false if these kernels do not suit the call.
bool Planner::clusters(const Request& r, const ClusterSizes& sizes, const Clusters& size) {
  const int64_t heads = r.heads() * r.ways, blocks = heads * size.spans * size.blocks;
  if (blocks == 0 || blocks >= int64_t{1} << 31) return false;
  const int bytes = cluster_bytes(sizes, r.group, size.blocks, size.warps);
  if (bytes == 0) return false;
  const LineOf line = r.lengths == Lengths::kAny ? LineOf{} : line_of(r);
  const bool spans = size.spans > 1;
  Instance instance{cluster_kernel(sizes, spans), sizes.head_size, sizes.columns};
  instance.wide = sizes.wide;
  Step s = step_of(r, instance, static_cast<int>(blocks), size.warps * 32, size.blocks, bytes);
  set_cluster(s, r, sizes.tokens ? r.tile_tokens * r.tile_heads : r.group, sizes.head_size / 4);
  s.query_rows = r.query_rows;
  s.tile_tokens = r.tile_tokens;
  if (r.lengths != Lengths::kAny) s.balance = balance_of(r, line, size.blocks, 1);
  if (sizes.invariant) {
    s.round_chunks = size.blocks * size.warps / kTeamWarps;
    s.exchange_bytes = invariant_exchange_bytes(sizes, r.group, size.blocks, size.warps);
  }
  if (spans) {
    const int round = size.blocks * size.warps * sizes.tile();
    set_spans(s, size.spans, sizes.head_size, keys_alone(sizes, size.spans, heads, round));
  }
  return with_line(r, line, s);
}

// Of four warps together.  alone: blocks without a cluster.  Returns false if there are more KV heads than find room at once or, where
// they are to share keys, too many for that.
bool Planner::verify_cluster(const Request& r, const VerifySizes& sizes, bool alone, bool may_span) {
  const int threads = (alone ? 2 : 3) * kThreads, bytes = alone ? sizes.alone_bytes : sizes.cluster_bytes;
  const int64_t heads = r.heads();
  int blocks = alone ? 1 : kMostBlocks, clusters;
  for (;; --blocks) {
    clusters = resident_clusters(blocks, threads, bytes, alone ? 2 : 1);
    if (heads <= clusters) break;
    if (blocks == 1) return false;
  }
  const int spans = may_span ? static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans)) : 1;
  if (may_span && (blocks < kMostBlocks || spans < kFewestSpans)) return false;
  const KernelId id = may_span ? KernelId::kVerifySpans : alone ? KernelId::kVerifyBlock : KernelId::kVerifyCluster;
  Request tiles = r;
  tiles.set_rows(sizes.rows);
  const int grid = static_cast<int>(heads * spans * blocks);
  Step s = step_of(r, {id, sizes.head_size, sizes.rows}, grid, threads, blocks, bytes);
  s.query_rows = sizes.rows;
  s.kv_tile = kVerifyTile;
  set_cluster(s, r, tiles.tile_tokens * tiles.tile_heads, 1);  // a block finishes whole rows
  if (r.lengths != Lengths::kAny) s.balance = balance_of(r, LineOf::kVerify, blocks, alone ? 2 : 1);
  if (may_span) {
    constexpr float kAlone = 4608;  // keys, as quickly by one cluster as by very many; measured on an H100
    set_spans(s, spans, sizes.head_size,
              static_cast<int>(kAlone * static_cast<float>(spans) / static_cast<float>(spans - 1)));
  }
  return with_line(r, LineOf::kVerify, s);
}

}  // namespace pykv::attention
