// Prefill on Hopper: sizes of its kernels, what lies in their shared memory, and which query tiles a block takes.
#pragma once

#include "attention/cuda/launch.cuh"
#include "attention/cuda/rows.cuh"
#include "attention/cuda/schedule/line.cuh"

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
  static constexpr bool kMayBeMixed = !kWide;
  static constexpr bool kQueriesInRegisters = !kWide;  // as fragments, beside their place in shared memory
  // A tile is columns of lines: 64 elements of each row, then the next 64.
  static constexpr int kQueryColumnBytes = kRows * 128, kColumnBytes = kTile * 128;
  static constexpr int kQueryBytes = kRows * kD * kBytes, kTileBytes = kTile * kD * kBytes;
  static constexpr int kMemoryBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kThreads = 384;
  static constexpr int kFeederRegisters = 56, kComputeRegisters = 224;  // with 40 the feeders spill where they copy
};

// Are query tiles of prefill taken whole, whatever the lengths?  prefers_whole() says why.
constexpr float kLineCost = 10, kLongestPart = 0.35f;
constexpr bool always_whole(int64_t max_seq_len, int kv_tile) {
  return kLongestPart * static_cast<float>(max_seq_len) <= kLineCost * static_cast<float>(kv_tile);
}

// Query tiles whole, instead of shares of the line.
struct WholeTiles {
  bool always;  // or only if the lengths suggest it
  PrefillCounts* counts;
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
  LineEnds ends;
  float sums[4], longest[4];   // of the feeders' warps
  PrefillSegment segments[8];  // as many segments later no warp can still be at this one

  alignas(16) uint32_t valid[3][4];  // of the stages' tokens, a quarter of a tile in each word, other bits set
  uint64_t key_full[3], key_empty[3], value_full[3], value_empty[3], queries_read;
};

// Named; two of the second and third, for both warpgroups.
enum PrefillBarrier { kFeedersBarrier = 1, kTurnBarrier = 2, kVoteBarrier = 4, kComputingBarrier = 6 };

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
    upto = inclusive_sum(upto);
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

// Sums of two numbers over the feeders.
__device__ inline void sum_of_feeders(float& x, float& y, float (&xs)[4], float (&ys)[4]) {
  for (int m = 1; m < 32; m *= 2) {
    x += __shfl_xor_sync(~0u, x, m);
    y += __shfl_xor_sync(~0u, y, m);
  }
  xs[threadIdx.x / 32] = x;
  ys[threadIdx.x / 32] = y;
  sync_finders<kFeedersBarrier>();
  x = xs[0] + xs[1] + xs[2] + xs[3];
  y = ys[0] + ys[1] + ys[2] + ys[3];
  sync_finders<kFeedersBarrier>();
}

// Of a mixed batch: so many blocks have query tiles, the others end at once, and their SMs are for the kernel that reads the other
// sequences' keys.  Each kernel has SMs in proportion to how long it would take on one, but prefill some more, for the other's
// blocks are many and short, and go on where prefill has ended.
constexpr float kReadCost = 0.5f;       // of a tile of keys, in products of it with a query tile; measured on an H200
constexpr float kFewestBlocks = 0.55f;  // of the device: the others draw nearly the whole bandwidth
__device__ inline int blocks_of_prefill(const Problem& p, float (&sums)[4], float (&others)[4]) {
  float multiplied = 0, read = 0;  // tiles of keys
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < p.a.num_seqs; i += kThreads) {
    const Sequence s = clamp_sequence(p, load_sequence(p, i));
    if (takes(p, s)) {
      const Extent extent(p, s);
      const auto tiles = [&](int j) { return static_cast<float>(extent.end_place(j) - extent.first_place(j)); };
      multiplied += extent.num_tiles * ((tiles(0) + tiles(extent.num_tiles - 1)) / 2 + 1);
    } else if (s.query_len > 0) {
      read += static_cast<float>(min(s.len, p.window)) / static_cast<float>(p.kv_tile);
    }
  }
  sum_of_feeders(multiplied, read, sums, others);
  multiplied *= p.head_tiles;
  if (multiplied == 0) return 1;
  const float part = fmaxf(multiplied / (multiplied + kReadCost * read), kFewestBlocks);
  return static_cast<int>(ceilf(part * gridDim.x));
}

// Are whole tiles the quicker way?  In places, which are KV tiles or, with batch_invariant, chunks: the line costs as many
// more to find one's place on it and to add up what was cut (kLineCost: in KV tiles), and a little for keys that are not in
// the L2 any more; whole tiles, part of the longest.
constexpr float kLineFactor = 1.12f;

__device__ inline bool prefers_whole(const Problem& p, int blocks, float (&sums)[4], float (&longest)[4]) {
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
  sum = (sums[0] + sums[1] + sums[2] + sums[3]) * p.a.num_kv_heads * p.head_tiles / blocks;
  most = fmaxf(fmaxf(longest[0], longest[1]), fmaxf(longest[2], longest[3]));
  return sum + kLongestPart * most <= kLineFactor * sum + kLineCost * p.kv_tile / p.place_tokens;
}

}  // namespace pykv::attention
