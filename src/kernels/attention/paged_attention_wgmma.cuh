// Prefill over a paged cache of 16 bits on Hopper's asynchronous matrix units (sm_90a).
//
//   out = softmax(scale * q . k) . v      by the online softmax, one KV tile after another
//
// A block of three warpgroups fills an SM.  One brings data: it walks the block's segments (a query tile of 128 rows, query
// tokens x the heads of a KV head, against its KV tiles of 128 tokens), looks up pages, and copies rows by 16-byte pieces
// into three stages for keys and three for values (heads of 256: two of 64 tokens).  Two compute 64 rows each: S = Q K^T
// and O += P V with Q and the weights P in registers.  A warpgroup asks for the next tile's S and for this tile's P V
// together and makes weights of S while P V is under way; the two take turns at asking, so that one's products run under
// the other's softmax.
//
// Segments come whole, the longest first, with all query tiles of as many KV heads as the L2 holds before the next heads;
// or, where a few tiles are much longer than a block's part of the work, in order of the line of
// paged_attention_plan.cuh, of which every block has an equal share.
//
// Bottleneck: the matrix units, floor = 4 * head size * visible (query, key) pairs * heads / 989 TFLOP/s.  They are busy for
// little more than half the time; docs/kernels/paged_attention.md lists what it is not.
#pragma once

#include <string_view>

#include "attention/paged_attention_load.cuh"
#include "attention/paged_attention_results.cuh"
#include "cuda/dependent.cuh"
#include "cuda/mbarrier.cuh"
#include "cuda/wgmma.cuh"

namespace pykv::attention {

// kD: head size rounded up to 64, 128 or 256.
template <class T, int kHeadSize>
struct PrefillShape {
  using Mma = T;
  static constexpr int kD = kHeadSize;
  static constexpr bool kWide = kD > 128;
  static constexpr int kRows = 128, kTile = kWide ? 64 : 128, kStages = kWide ? 2 : 3;
  static constexpr int kBytes = 2;
  static constexpr bool kPackedV = false, kNvfp4 = false, kScaled = false;
  static constexpr bool kQueriesInRegisters = !kWide;  // as fragments, beside their place in shared memory
  // A tile is columns of lines: 64 elements of each row, then the next 64.
  static constexpr int kQueryColumnBytes = kRows * 128, kColumnBytes = kTile * 128;
  static constexpr int kQueryBytes = kRows * kD * kBytes, kTileBytes = kTile * kD * kBytes;
  static constexpr int kMemoryBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kThreads = 384;
  static constexpr int kFeederRegisters = 40, kComputeRegisters = 232;
};

// Query tiles whole, instead of shares of the line.
struct WholeTiles {
  bool always;         // or only if the lengths suggest it
  int* taken;          // entries of TileList beside the blocks' first
  int64_t head_bytes;  // of a KV head's keys and values for each token
};

// A query tile against `tiles` KV tiles; 0: there are no more.
struct PrefillSegment {
  Unit unit;
  int tiles;
};

struct alignas(16) PrefillScratch {  // for up to three stages
  PlanScratch plan;
  Walker walker;
  float sums[4], longest[4];   // of the feeders' warps
  PrefillSegment segments[8];  // as many segments later no warp can still be at this one

  alignas(16) uint32_t valid[3][4];  // of the stages' tokens, a quarter of a tile in each word, other bits set
  uint64_t key_full[3], key_empty[3], value_full[3], value_empty[3], queries_read;
};

enum PrefillBarrier { kFeedersBarrier = 1, kTurnBarrier = 2 };  // named; a turn for each computing warpgroup

// Query tiles of all sequences in one list; of a sequence, KV heads in bundles, of a bundle the longest tiles first.  Block
// b takes entry b, and whenever it has dealt with one, the next that nobody has taken.
struct TileList {
  const Problem& p;
  const WholeTiles& whole;
  int first_sequence = -32;  // of the 32 that the lanes know
  int64_t before = 0;        // tiles of those before them
  int64_t upto = 0;          // and up to this lane's, inclusive
  int64_t total = 0;         // of the 32
  Sequence own{};

  __device__ int heads() const { return p.a.num_kv_heads * p.head_tiles; }

  __device__ void load(int lane) {
    before += total;
    first_sequence += 32;
    const RawSequence raw = load_sequence(p, first_sequence + lane);
    own = clamp_sequence(p, raw);
    if (blockIdx.x == 0) report_sequence(p, raw);
    upto = takes(p, own) ? static_cast<int64_t>((own.query_len + p.tile_tokens - 1) / p.tile_tokens) * heads() : 0;
#pragma unroll 1
    for (int delta = 1; delta < 32; delta *= 2) {
      const int64_t below = __shfl_up_sync(~0u, upto, delta);
      if (lane >= delta) upto += below;
    }
    total = __shfl_sync(~0u, upto, 31);
  }

  // All lanes of a warp, with growing entries.
  __device__ PrefillSegment get(int64_t at, int lane) {
    while (at >= before + total && first_sequence + 32 < p.a.num_seqs) load(lane);
    PrefillSegment segment{};
    if (at >= before + total) return segment;
    const int from = __ffs(__ballot_sync(~0u, at < before + upto)) - 1;
    Sequence s;
    s.len = __shfl_sync(~0u, own.len, from);
    s.query_begin = __shfl_sync(~0u, own.query_begin, from);
    s.query_len = __shfl_sync(~0u, own.query_len, from);
    const Extent extent(p, s);
    const int64_t end = before + __shfl_sync(~0u, upto, from);
    const int offset = static_cast<int>(at - (end - static_cast<int64_t>(extent.num_tiles) * heads()));

    constexpr int64_t kCachedBytes = 24 << 20;
    const int bundle = static_cast<int>(
        min(max(kCachedBytes / (whole.head_bytes * max(s.len, 1)), int64_t{1}), static_cast<int64_t>(heads())));
    const int first = offset / (bundle * extent.num_tiles) * bundle, rest = offset - first * extent.num_tiles;
    const int width = min(bundle, heads() - first), down = rest / width, head = first + rest - down * width;
    Unit& u = segment.unit;
    u.sequence = first_sequence + from;
    u.sequence_len = s.len;
    u.query_begin = s.query_begin;
    u.query_len = s.query_len;
    u.kv_head = head / p.head_tiles;
    u.head_tile = head - u.kv_head * p.head_tiles;
    u.query_tile = extent.num_tiles - 1 - down;
    u.first_key = extent.first_key(u.query_tile);
    u.last_key = extent.last_key(u.query_tile);
    u.first_token = u.first_key & -p.kv_tile;
    u.slot = -1;
    segment.tiles = max((u.last_key - u.first_token) / p.kv_tile + 1, 1);
    return segment;
  }
};

// Are whole tiles the quicker way?  In KV tiles: the line costs as many more to find one's place on it and to add up what
// was cut, and a little for keys that are not in the L2 any more; whole tiles, part of the longest.
constexpr float kLineCost = 10, kLineFactor = 1.12f, kLongestPart = 0.35f;

__device__ inline bool prefers_whole(const Problem& p, float (&sums)[4], float (&longest)[4]) {
  float sum = 0, most = 0;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < p.a.num_seqs; i += kThreads) {
    const Sequence s = clamp_sequence(p, load_sequence(p, i));
    if (!takes(p, s)) continue;
    const Extent extent(p, s);
    const auto tiles = [&](int j) { return static_cast<float>(extent.end_place(j) - extent.first_place(j)); };
    const float first = tiles(0), last = tiles(extent.num_tiles - 1);
    sum += extent.num_tiles * ((first + last) / 2 + 1);
    most = fmaxf(most, fmaxf(first, last));
  }
  for (int m = 1; m < 32; m *= 2) {
    sum += __shfl_xor_sync(~0u, sum, m);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
  }
  sums[threadIdx.x / 32] = sum;
  longest[threadIdx.x / 32] = most;
  sync_finders<kFeedersBarrier>();
  sum = (sums[0] + sums[1] + sums[2] + sums[3]) * p.a.num_kv_heads * p.head_tiles / gridDim.x;
  most = fmaxf(fmaxf(longest[0], longest[1]), fmaxf(longest[2], longest[3]));
  return sum + kLongestPart * most <= kLineFactor * sum + kLineCost;
}

// The warpgroup that brings data.
template <class S>
struct PrefillFeeder {
  static constexpr int kD = S::kD;
  static constexpr int kChunks = kD / 8, kRowsAtOnce = 32 / kChunks;  // 16-byte pieces of a row; rows of a warp's copy
  static constexpr int kTokens = S::kTile / 4;                        // of a tile, whose pages a warp looks up

  const Problem& p;
  const CacheCopies& copies;
  const WholeTiles& whole;
  PrefillScratch& scratch;
  uint32_t queries, keys, values;  // shared memory
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // As many rows as a warp has of a tile, whose beginnings its lanes know.
  template <int kCount, bool kChecked>
  __device__ void copy_rows(uint32_t tile, const char* row) const {
    constexpr int kColumn = 4 * kCount * 128;
    const int chunk = lane % kChunks, r = lane / kChunks;
    const bool in_head = !kChecked || chunk * 16 < copies.head_bytes;
    const uint32_t to = tile + chunk / 8 * kColumn + (warp * kCount + r) * 128 + ((chunk % 8 ^ r) * 16);
    const auto bits = reinterpret_cast<unsigned long long>(row);
#pragma unroll
    for (int i = 0; i < kCount; i += kRowsAtOnce) {
      const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, bits, i + r));
      const bool read = !kChecked || (from != nullptr && in_head);
      const uint32_t place = (to ^ (i % 8 * 16)) + i * 128;
      if (kChecked) {
        cp_async_16(place, read ? from + chunk * 16 : static_cast<const char*>(p.a.query), read);
      } else {
        cp_async_16(place, from + chunk * 16);
      }
    }
  }

  __device__ void copy_tokens(uint32_t tile, const char* row, bool ok, bool all) const {
    if (all) {
      copy_rows<kTokens, false>(tile, row);
    } else {
      copy_rows<kTokens, true>(tile, ok ? row : nullptr);
    }
  }

  __device__ void wait_empty(uint64_t& empty, int parity) const {
    mbarrier_wait(shared_address(&empty), parity);
    __syncwarp();
  }

  __device__ void copy_queries(const Unit& u) const {
    const Row row = row_of(p, u, warp * 32 + lane);
    const auto* at =
        static_cast<const uint16_t*>(p.a.query) + row.token * p.a.query_token_stride + row.head * p.a.query_head_stride;
    copy_rows<32, true>(queries, row.valid ? reinterpret_cast<const char*>(at) : nullptr);
  }

  // The copies' arrival says nothing of what was written beside them: the segment and the valid tokens.
  __device__ void commit_keys(int stage) const {
    const uint32_t full = shared_address(&scratch.key_full[stage]);
    cp_async_arrive(full);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full);
  }

  struct Lookup {
    PageEntry page;
    int token;
    bool wanted;
  };

  __device__ Lookup look_up(const Unit& u, int tile) const {
    Lookup x{{0, 0}, u.first_token + tile * S::kTile + warp * kTokens + lane, false};
    x.wanted = lane < kTokens && is_wanted(p, u, x.token);
    if (x.wanted) x.page = load_page(p, u.sequence, x.token);
    return x;
  }

  __device__ void feed(bool is_whole) {
    TileList list{p, whole};
    int entry = blockIdx.x;  // of lane 0 of the first warp
    int filled = 0;          // tiles
#pragma unroll 1
    for (int n = 0;; ++n) {
      PrefillSegment& segment = scratch.segments[n % 8];
      if (is_whole) {
        if (warp == 0) {
          const PrefillSegment found = list.get(__shfl_sync(~0u, entry, 0), lane);
          if (lane == 0) {
            segment = found;
            entry = gridDim.x + atomicAdd(whole.taken, 1);  // arrives while the segment is fed
          }
        }
      } else if (threadIdx.x == 0) {
        Walker& walker = scratch.walker;
        segment.unit = walker.unit;
        segment.tiles = walker.unit.exists ? walker.in_segment : 0;
        if (walker.unit.exists) walker.next_segment(p);
      }
      named_barrier_sync(kFeedersBarrier, kThreads);
      const int tiles = segment.tiles, kv_head = segment.unit.kv_head;
      Lookup next;
      if (tiles > 0) next = look_up(segment.unit, 0);
#pragma unroll 1
      for (int j = 0; j < max(tiles, 1); ++j, ++filled) {
        const int stage = filled % S::kStages, parity = filled / S::kStages % 2 ^ 1;
        wait_empty(scratch.key_empty[stage], parity);
        if (tiles == 0) {  // the end
          commit_keys(stage);
          cp_async_wait<0>();
          return;
        }
        if (j == 0) {
          wait_empty(scratch.queries_read, n % 2 ^ 1);
          copy_queries(segment.unit);
        }
        const Lookup x = next;
        const int64_t id = x.page.id(p);
        const bool ok = x.wanted && id >= 0 && id < p.a.num_blocks;
        if (x.wanted && !ok) p.bad_block(id, p.a.num_blocks);
        // The causal mask of its row hides what no row wants.
        const uint32_t valid = __ballot_sync(~0u, ok || (p.a.causal && !x.wanted) || lane >= kTokens);
        if (lane == 0) scratch.valid[stage][warp] = valid;
        const int o = p.block_size.remainder(x.token);
        const char* key = static_cast<const char*>(p.a.key.data) + id * copies.key_block + o * copies.key_token +
                          kv_head * copies.key_head;
        const char* value = static_cast<const char*>(p.a.value.data) + id * copies.value_block +
                            o * copies.value_token + kv_head * copies.value_head;
        const bool all = __all_sync(~0u, ok || lane >= kTokens) && copies.head_bytes == kD * 2;
        copy_tokens(keys + stage * S::kTileBytes, key, ok, all);
        commit_keys(stage);
        if (j + 1 < tiles) next = look_up(segment.unit, j + 1);
        wait_empty(scratch.value_empty[stage], parity);
        copy_tokens(values + stage * S::kTileBytes, value, ok, all);
        cp_async_arrive(shared_address(&scratch.value_full[stage]));
      }
    }
  }

  __device__ void run() {
    const bool is_whole = whole.always || prefers_whole(p, scratch.sums, scratch.longest);
    if (!is_whole) {
      const SharePosition share = find_share<kFeedersBarrier>(p, scratch.plan);
      if (threadIdx.x == 0) scratch.walker.start(p, share);
    } else if (!whole.always && threadIdx.x == 0) {
      p.unfinished[blockIdx.x].first_block = -1;
    }
    give_registers<S::kFeederRegisters>();
    feed(is_whole);
  }
};

// A warpgroup that computes.
template <class S>
struct PrefillRows {
  using T = typename S::Mma;
  using Products = Wgmma<T, S::kTile>;
  using ValueProducts = Wgmma<T, S::kD>;
  static constexpr int kD = S::kD, kTile = S::kTile, kTokens = kTile / 4;

  const Problem& p;
  PrefillScratch& scratch;
  uint32_t queries, keys, values;
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;        // known to be uniform
  const int row0 = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // of this lane; the other is 8 further

  float s[kTile / 2];  // scores, then weights
  float o[kD / 2];     // sums
  uint32_t weights[kTile / 16][4];
  uint32_t query[S::kQueriesInRegisters ? kD / 16 : 1][4];
  float maximum[2], sum[2], rescale[2];
  int position[2], first_position, last_position;

  __device__ void arrive(uint64_t& empty) const {
    if (lane == 0) mbarrier_arrive(shared_address(&empty));
  }

  __device__ void take_turn() const { named_barrier_sync(kTurnBarrier + group, 256); }
  __device__ void end_turn() const { named_barrier_arrive(kTurnBarrier + 1 - group, 256); }

  __device__ void load_queries() {
    const int r = group * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const int chunk = i * 2 + lane / 16;
      ldmatrix_x4(query[i], queries + r * 128 + chunk / 8 * S::kQueryColumnBytes + (chunk % 8 ^ r % 8) * 16);
    }
    arrive(scratch.queries_read);
  }

  __device__ void ask_scores(int stage) {
    const uint64_t q = wgmma_matrix(queries + group * 64 * 128, 1024);
    const uint64_t k = wgmma_matrix(keys + stage * S::kTileBytes, 1024);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const uint64_t key = wgmma_further(k, i / 4 * S::kColumnBytes + i % 4 * 32);
      if constexpr (S::kQueriesInRegisters) {
        Products::template rs<kAlong>(s, query[i], key, i > 0);
      } else {
        Products::ss(s, wgmma_further(q, i / 4 * S::kQueryColumnBytes + i % 4 * 32), key, i > 0);
      }
    }
    wgmma_commit();
  }

  __device__ void ask_sums(int stage, bool first) {
    const uint64_t v = wgmma_matrix(values + stage * S::kTileBytes, 1024, S::kColumnBytes);
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) {
      ValueProducts::template rs<kAcross>(o, weights[i], wgmma_further(v, i * 16 * 128), i > 0 || !first);
    }
    wgmma_commit();
  }

  __device__ void wait_full(uint64_t& full, int parity) const {
    mbarrier_wait(shared_address(&full), parity);
    fence_async_proxy();  // cp.async writes like an ordinary store
  }

  // What this lane's rows may not see.
  __device__ void mask(int first, const uint4& valid) {
    const int column0 = lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int low = position[h] - p.window + 1 - first - column0;
      const int high = (p.a.causal ? position[h] : position[h] + p.window - 1) - first - column0;
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (i * 8 + e < low || i * 8 + e > high) s[4 * i + 2 * h + e] = -INFINITY;
        }
      }
    }
    if ((valid.x & valid.y & valid.z & valid.w) == ~0u) return;
    const uint32_t words[4] = {valid.x >> column0, valid.y >> column0, valid.z >> column0, valid.w >> column0};
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (words[i * 8 / kTokens] >> (i * 8 % kTokens + e) & 1) continue;
        s[4 * i + e] = s[4 * i + 2 + e] = -INFINITY;
      }
    }
  }

  // Scores to weights.  The sums are kept relative to a maximum that may lag behind by a factor of 256, and is a whole
  // number, so that following it is rare and rounds nothing; returns whether a row of the warp does.
  __device__ bool softmax(const Unit& u, int tile, const uint4& valid) {
    const int first = u.first_token + tile * kTile, last = first + kTile - 1;
    const bool masked =
        (valid.x & valid.y & valid.z & valid.w) != ~0u || (p.a.causal && last > first_position) ||
        (p.window != kNoWindow && (last_position - first >= p.window || last - first_position >= p.window));
    if (masked) [[unlikely]]
      mask(first, valid);
    constexpr float kLag = 8;
    const float scale = p.a.scale * kLog2e;
    float top[2];
    bool rose = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4] = {s[2 * h], s[2 * h + 1], s[4 + 2 * h], s[5 + 2 * h]};
#pragma unroll
      for (int i = 2; i < kTile / 8; ++i) {
        for (int e = 0; e < 2; ++e) x[i % 2 * 2 + e] = fmaxf(x[i % 2 * 2 + e], s[4 * i + 2 * h + e]);
      }
      float y = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
      y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
      top[h] = y * scale;
      rose = rose || top[h] > maximum[h] + kLag;
    }
    const bool any_rose = __any_sync(~0u, rose);
    if (any_rose) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float old = maximum[h], now = top[h] > old + kLag ? ceilf(top[h]) : old;
        rescale[h] = exp2_fast(old - (now == -INFINITY ? 0.f : now));
        maximum[h] = now;
        sum[h] *= rescale[h];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = maximum[h] == -INFINITY ? 0.f : maximum[h];
      float part[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kTile / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * i + 2 * h + e];
          x = exp2_fast(fmaf(x, scale, -base));
          part[e] += x;
        }
      }
      sum[h] += part[0] + part[1];
    }
    return any_rose;
  }

  __device__ void round_weights() {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i / 4][i % 4] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  __device__ void rescale_sums() {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) o[i] *= rescale[i / 2 % 2];
  }

  __device__ uint4 valid_of(int stage) const { return *reinterpret_cast<const uint4*>(scratch.valid[stage]); }

  // Four neighbouring columns of this lane, from two column tiles, for the row half h.
  __device__ void for_each_four(int h, auto&& body) const {
    const int c = lane % 4;
    const bool odd = c & 1;
#pragma unroll
    for (int i = 0; i < kD / 8; i += 2) {
      const float a0 = o[4 * i + 2 * h], a1 = o[4 * i + 2 * h + 1], b0 = o[4 * i + 4 + 2 * h],
                  b1 = o[4 * i + 5 + 2 * h];
      const float got0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), got1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
      body(i * 8 + (odd ? 8 : 0) + c / 2 * 4, odd ? float4{got0, got1, b0, b1} : float4{a0, a1, got0, got1});
    }
  }

  __device__ void end_segment(const Unit& u, const float (&maximum)[2], const float (&sum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row0 + h * 8;
      const Row row = row_of(p, u, r);
      float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if (u.slot >= 0) {
        const int64_t at = static_cast<int64_t>(u.slot) * p.rows + r;
        if (lane % 4 == 0) p.partial_stats[at] = {maximum[h], all};
        float* partial = p.partial + at * p.pitch;
        for_each_four(h, [&](int d, float4 x) {
          if (row.valid) *reinterpret_cast<float4*>(partial + d) = x;
        });
      } else {
        const float f = row.valid ? finish_row(p, row, u.kv_head, maximum[h], all) : 0.f;
        T* out = output_row<T>(p, row);
        for_each_four(h, [&](int d, float4 x) {
          if (row.valid) store_columns(p, out, d, float4{x.x * f, x.y * f, x.z * f, x.w * f});
        });
      }
    }
  }

  __device__ const PrefillSegment& segment_of(int n) const { return scratch.segments[n % 8]; }

  __device__ void begin_segment(const Unit& u) {
    position[0] = row_of(p, u, row0).position;
    position[1] = row_of(p, u, row0 + 8).position;
    first_position = row_of(p, u, group * 64).position;
    last_position = row_of(p, u, group * 64 + 63).position;
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -INFINITY;
      sum[h] = 0;
    }
    if constexpr (S::kQueriesInRegisters) load_queries();
  }

  __device__ void release_keys(int stage, bool last) const {
    arrive(scratch.key_empty[stage]);
    if (!S::kQueriesInRegisters && last) arrive(scratch.queries_read);
  }

  // Tile j of segment n: its scores are asked for together with the sums of the tile before, which may end segment n - 1.
  __device__ void run() {
    take_registers<S::kComputeRegisters>();
    if (group == 1) end_turn();  // the first turn is the other's
    wait_full(scratch.key_full[0], 0);
    int n = 0, tiles = segment_of(0).tiles;
    if (tiles == 0) return;
    begin_segment(segment_of(0).unit);
    wgmma_pin(s);
    wgmma_begin();
    ask_scores(0);
    uint4 valid = valid_of(0);
    wgmma_wait<0>();
    wgmma_pin(s);
    release_keys(0, tiles == 1);
    softmax(segment_of(0).unit, 0, valid);
    round_weights();
    bool first = true;  // the tile before is the first of its segment
#pragma unroll 1
    for (int j = 1, used = 1;; ++j, ++used) {
      const int stage = used % S::kStages, parity = used / S::kStages % 2;
      const int before = (used - 1) % S::kStages, parity_before = (used - 1) / S::kStages % 2;
      wait_full(scratch.key_full[stage], parity);
      float ended_maximum[2], ended_sum[2];
      if (j == tiles) {
        tiles = segment_of(++n).tiles;
        if (tiles == 0) {
          wait_full(scratch.value_full[before], parity_before);
          wgmma_pin(o);
          wgmma_begin();
          ask_sums(before, first);
          wgmma_wait<0>();
          wgmma_pin(o);
          end_segment(segment_of(n - 1).unit, maximum, sum);
          return;
        }
        j = 0;
        for (int h = 0; h < 2; ++h) {
          ended_maximum[h] = maximum[h];
          ended_sum[h] = sum[h];
        }
        begin_segment(segment_of(n).unit);
      }
      take_turn();
      wgmma_pin(s);
      wgmma_pin(o);
      wgmma_begin();
      ask_scores(stage);
      wait_full(scratch.value_full[before], parity_before);
      wgmma_begin();
      ask_sums(before, first);
      end_turn();
      first = j == 0;
      valid = valid_of(stage);
      wgmma_wait<1>();
      wgmma_pin(s);
      release_keys(stage, j + 1 == tiles);
      const bool rose = softmax(segment_of(n).unit, j, valid);
      // Never true: the branch keeps the compiler from putting off the weights until after the wait.
      if (fminf(sum[0], sum[1]) < 0) __nanosleep(0);
      wgmma_wait<0>();
      wgmma_pin(o);
      arrive(scratch.value_empty[before]);
      round_weights();
      if (first) {
        end_segment(segment_of(n - 1).unit, ended_maximum, ended_sum);
      } else if (rose) {
        rescale_sums();
      }
    }
  }
};

template <class S>
constexpr int prefill_shared_bytes() {
  return S::kMemoryBytes + static_cast<int>(sizeof(PrefillScratch)) + 1024;  // aligned by the kernel
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    paged_attention_wgmma_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies,
                                 const __grid_constant__ WholeTiles whole) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  char* memory = unaligned + (-shared_address(unaligned) & 1023);
  const uint32_t queries = shared_address(memory), keys = queries + S::kQueryBytes,
                 values = keys + S::kStages * S::kTileBytes;
  auto& scratch = *reinterpret_cast<PrefillScratch*>(memory + S::kMemoryBytes);
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&scratch.queries_read), 8);
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(shared_address(&scratch.key_full[i]), kThreads + kThreads / 32);
      mbarrier_init(shared_address(&scratch.value_full[i]), kThreads);
      mbarrier_init(shared_address(&scratch.key_empty[i]), 8);  // warps
      mbarrier_init(shared_address(&scratch.value_empty[i]), 8);
    }
    fence_async_proxy();
  }
  wait_for_previous_kernel();
  __syncthreads();
  if (threadIdx.x < kThreads) {
    PrefillFeeder<S> feeder{p, copies, whole, scratch, queries, keys, values};
    feeder.run();
  } else {
    PrefillRows<S> rows{p, scratch, queries, keys, values};
    rows.run();
  }
#endif
}

// Nobody has taken an entry yet.
static __global__ void clear_kernel(int* taken) {
  wait_for_previous_kernel();
  *taken = 0;
}

template <class S>
bool launch_wgmma_kernel(Problem p, const Launch& launch) {
  constexpr int kSharedBytes = prefill_shared_bytes<S>();
  const auto kernel = paged_attention_wgmma_kernel<S>;
  static PerDevice ready;
  ready.get(launch.device, [&] {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), p.a.op);
    return 1;
  });
  p.kv_tile = p.place_tokens = S::kTile;
  const int grid = set_tiling(p, {S::kRows, S::kD, 1}, 1, launch.device);
  // Where no tile is long, the longest cannot be what decides.
  WholeTiles whole{
      kLongestPart * p.a.max_seq_len <= kLineCost * S::kTile,
      reinterpret_cast<int*>(p.partial + int64_t{2} * grid * p.rows * p.pitch),  // the room of a larger grid
      int64_t{4} * p.a.head_size};
  launch_after(clear_kernel, dim3(1), dim3(1), 1, 0, launch, p.a.op, whole.taken);
  launch_after(kernel, dim3(grid), dim3(S::kThreads), 1, kSharedBytes, launch, p.a.op, p, cache_copies<S>(p.a), whole);
  if (!whole.always) combine(p, grid, launch);
  return true;
}

// Can these kernels take this call, on this device?
inline bool suits_wgmma(const Problem& p, const Launch& launch) {
  constexpr bool kBuilt = std::string_view(PYKV_CUDA_ARCHITECTURES).find("90a") != std::string_view::npos;
  const PagedAttentionArgs& a = p.a;
  int major = 0;
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, launch.device), "compute capability");
  return kBuilt && major == 9 && a.value.dim == 1 && a.key.chunk >= a.head_size && p.plain_logits && !p.sparse &&
         !a.batch_invariant;
}

// False if the call is not for these kernels.
template <class T>
bool launch_wgmma(const Problem& p, const Launch& launch) {
  if (!suits_wgmma(p, launch)) return false;
  if (p.a.head_size <= 64) return launch_wgmma_kernel<PrefillShape<T, 64>>(p, launch);
  if (p.a.head_size <= 128) return launch_wgmma_kernel<PrefillShape<T, 128>>(p, launch);
  return launch_wgmma_kernel<PrefillShape<T, 256>>(p, launch);
}

}  // namespace pykv::attention
