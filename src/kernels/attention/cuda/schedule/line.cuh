// How the work of one call is divided, found by every block for itself from the lengths on the device.
//
// Unit of work: one KV tile (Problem::kv_tile tokens) against one query tile (up to Problem::rows rows, a row being a
// query token and a head).  All units of all sequences lie on one line, ordered by sequence, KV head, query tile, KV tile,
// and the blocks take equal shares of it.  A query tile's units are a segment; it has one place more, in front, that stands
// for the cost of beginning and ending it.  A segment cut by a border of blocks leaves partial results, at most two a
// block, added up in a fixed order by the last of these blocks or by the next kernel (merge/): hence a grid and a
// workspace that depend on no length, no host synchronisation, and the same bits in every run.
//
// Kernels may ask for a line for each KV head, which blocks go along side by side: where neighbouring heads lie together, they are
// then read at about the same time.
//
// With batch_invariant a place is a chunk, some KV tiles whose sums are added up by themselves (merge/exact.cuh),
// and there is none in front: chunks are too long to stand for that.
#pragma once

#include "attention/cuda/problem.cuh"
#include "cuda/reduce.cuh"

namespace pykv::attention {

// Division that is quick where 32 bits are enough.
__device__ inline int64_t divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// Sum of floor((a * i + b) / m) over 0 <= i < n, by the steps of Euclid's algorithm.
__device__ inline int64_t floor_sum(int64_t n, int64_t m, int64_t a, int64_t b) {
  int64_t sum = 0;
  while (n > 0) {
    const int64_t a_by_m = divide(a, m), b_by_m = divide(b, m);
    sum += n * (n - 1) / 2 * a_by_m + n * b_by_m;
    a -= a_by_m * m;
    b -= b_by_m * m;
    const int64_t y = a * n + b;
    if (y < m) break;
    n = divide(y, m);
    b = y - n * m;
    const int64_t swap = m;
    m = a;
    a = swap;
  }
  return sum;
}

// Sum of clamp(start + j * step, 0, last) >> shift over 0 <= j < n.  Rare: kept out of the callers' code.
static __device__ __noinline__ int64_t sum_of_places(int64_t n, int64_t start, int64_t step, int last, int shift) {
  if (step == 0) return n * (clamp(start, 0, last) >> shift);
  const int64_t rising = min(n, start >= 0 ? 0 : divide(step - 1 - start, step));
  const int64_t flat = min(n, start >= last ? 0 : divide(last - start + step - 1, step));
  if (flat <= rising) return (n - rising) * (last >> shift);
  return floor_sum(flat - rising, int64_t{1} << shift, step, start + rising * step) + (n - flat) * (last >> shift);
}

// The visible keys of each query tile of one sequence, in tokens and in places.
struct Extent {
  int tokens, shift;  // query tokens in a tile; a place has 2^shift keys
  int lead;           // places in front of a tile's
  int num_tiles;      // query tiles
  int last;           // the last key's index, or 0
  int high, low;      // of tile j: keys high + j * tokens and low + j * tokens, clamped, are its last and its first

  Extent() = default;
  __device__ Extent(const Problem& p, const Sequence& s) : tokens(p.tile_tokens), lead(p.lead) {
    shift = 31 - __clz(p.place_tokens);
    num_tiles = p.by_tile_tokens.quotient(s.query_len + tokens - 1);
    last = max(s.len - 1, 0);
    const int end = s.context() + tokens - 1;  // position of the first tile's last token
    high = p.a.causal ? end : p.window == kNoWindow ? last : min(end, kNoWindow) + p.window - 1;
    low = s.context() - p.window + 1;
    high_step = p.a.causal || p.window != kNoWindow ? tokens : 0;
  }

  __device__ int first_key(int j) const { return clamp_key(low + static_cast<int64_t>(j) * tokens); }
  __device__ int last_key(int j) const { return clamp_key(high + static_cast<int64_t>(j) * high_step); }
  __device__ int first_place(int j) const { return first_key(j) >> shift; }
  __device__ int end_place(int j) const { return (last_key(j) >> shift) + 1; }

  // Places on the line of query tiles 0 .. n - 1.  Even a tile without a visible key has a unit: its rows want zeros.
  __device__ int64_t units_before(int n) const {
    if (n == 0) return 0;
    if (n == 1) return lead + end_place(0) - first_place(0);
    return (1 + lead) * n + sum_of_places(n, high, high_step, last, shift) - sum_of_places(n, low, tokens, last, shift);
  }
  __device__ int64_t units() const { return units_before(num_tiles); }

 private:
  int high_step;

  __device__ int clamp_key(int64_t key) const { return static_cast<int>(clamp(key, 0, last)); }
};

// The pieces that blocks first_block, first_block + step, ... leave of a segment.
struct SegmentPieces {
  int first_block, pieces, step;
  bool first_is_head;  // is it the first block's first segment?

  __device__ int slot(int i) const { return 2 * (first_block + i * step) + (i == 0 && !first_is_head); }
};

// A line in equal shares; the first `longer` blocks have one place more.  All heads are on one line, or each on one of its own:
// every `lines`-th block, from `line` on, is on this one.
struct Shares {
  int64_t units;
  int blocks, each, longer;
  int lines, line;

  Shares() = default;
  __device__ Shares(int64_t n, int of_blocks) : units(n), lines(1), line(0) {
    blocks = static_cast<int>(min(n, static_cast<int64_t>(of_blocks)));
    each = n <= of_blocks ? 1 : static_cast<int>(divide(n, of_blocks));
    longer = static_cast<int>(n - static_cast<int64_t>(each) * blocks);
  }
  __device__ int64_t begin(int block) const { return static_cast<int64_t>(block) * each + min(block, longer); }
  __device__ int block_of(int64_t unit) const {
    const int64_t in_longer = static_cast<int64_t>(longer) * (each + 1);
    return static_cast<int>(unit < in_longer ? divide(unit, each + 1) : longer + divide(unit - in_longer, each));
  }

  // Of a segment of so many places, of which the first `lead` are no work.
  __device__ SegmentPieces pieces(int64_t begin_place, int places, int lead) const {
    const int first = block_of(begin_place + lead), last = block_of(begin_place + places - 1);
    return {first * lines + line, last - first + 1, lines, begin(first) >= begin_place};
  }
};

struct SharePosition {
  Shares shares;
  int block;     // on its line
  int sequence;  // in which this block's share begins
  Sequence seq;
  int64_t offset;  // from the sequence's first place
};

template <int kBlock>
struct PlanScratchOf {
  int64_t warp_units[kBlock / 32];
  int64_t offset;
  int sequence;
  Sequence seq;
};
using PlanScratch = PlanScratchOf<kThreads>;

// Of the threads that look for their share: the block's, or its first kThreads, which then have a named barrier.
template <int kBarrier>
__device__ inline void sync_finders() {
  if constexpr (kBarrier == 0) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
  }
}

// Inclusive sum over these threads; `total` is that of all.
template <int kBarrier, int kBlock>
__device__ inline int64_t block_scan(int64_t x, PlanScratchOf<kBlock>& scratch, int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = inclusive_sum(x);
  if (lane == 31) scratch.warp_units[warp] = x;
  sync_finders<kBarrier>();
  total = 0;
  for (int w = 0; w < kBlock / 32; ++w) {
    if (w < warp) x += scratch.warp_units[w];
    total += scratch.warp_units[w];
  }
  sync_finders<kBarrier>();
  return x;
}

// Are neighbouring heads together in memory, few, with blocks enough for each, and shares so long that they are worth a line each?
__device__ inline bool wants_lines(const Problem& p, int64_t heads, int64_t units) {
  constexpr int kMostLines = 32, kFewestBlocks = 8, kLongShare = 16;
  return p.a.key.head < p.a.key.token && heads > 1 && heads <= kMostLines && heads * kFewestBlocks <= gridDim.x &&
         units * heads >= gridDim.x * kLongShare;
}

// Of segments that are all alike, not quite as many blocks may have whole ones, and leave no pieces.  0: there is no such number.
__device__ inline int blocks_of_whole(int segments, int blocks) {
  const int each = (segments + blocks - 1) / blocks, fewer = each == 0 ? 0 : segments / each;
  return fewer * each == segments && fewer * 16 >= blocks * 15 ? fewer : 0;
}

// Two passes over the lengths: the sum of all work, then the place where this block's share begins.
template <int kBarrier = 0, bool kLines = false, int kBlock>
__device__ inline SharePosition find_share(const Problem& p, PlanScratchOf<kBlock>& scratch, int all_blocks) {
  int heads = static_cast<int>(p.by_heads.d);  // of a line
  const bool one_chunk = p.a.num_seqs <= kBlock;
  SharePosition at{};
  at.block = blockIdx.x;
  int64_t before = 0, begin = 0;  // in units of a head; on the line
  // alike: so many sequences have one segment of a head, each of the same length, and others none; or 0.
  const auto share = [&](int64_t units, int alike) {
    int blocks = all_blocks, lines = 1, line = 0;
    if (kLines && wants_lines(p, heads, units)) {
      at.block = p.by_heads.quotient(blockIdx.x);
      lines = heads;
      line = blockIdx.x - at.block * heads;
      blocks = p.by_heads.quotient(all_blocks);
      heads = 1;
    }
    const int whole = blocks_of_whole(alike * heads, blocks);
    at.shares = Shares(units * heads, whole > 0 ? whole : blocks);
    at.shares.lines = lines;
    at.shares.line = line;
    begin = at.shares.begin(at.block);
  };
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int64_t chunk = 0; chunk < p.a.num_seqs; chunk += kBlock) {
      const int64_t s = chunk + threadIdx.x;
      int64_t units = 0, total;
      bool one_tile = false;  // has the sequence one query tile?
      Sequence sequence{};
      if (s < p.a.num_seqs) {
        const RawSequence raw = load_sequence(p, s);
        sequence = clamp_sequence(p, raw);
        if (blockIdx.x == 0 && pass == 0) report_sequence(p, raw);
        if (takes(p, sequence)) {
          const Extent extent(p, sequence);
          units = extent.units();
          one_tile = extent.num_tiles == 1;
        }
      }
      const int64_t end = before + block_scan<kBarrier>(units, scratch, total);
      if (pass == 0 && one_chunk) {  // the sums serve both passes
        int alike = 0;
        if constexpr (kBarrier == 0) {
          const int taken = __syncthreads_count(units > 0);
          alike = __syncthreads_and(units == 0 || (one_tile && units * taken == total)) ? taken : 0;
        }
        share(total, alike);
        pass = 1;
      }
      if (pass == 1 && begin >= (end - units) * heads && begin < end * heads) {
        scratch.sequence = static_cast<int>(s);
        scratch.seq = sequence;
        scratch.offset = begin - (end - units) * heads;
      }
      before += total;
    }
    if (pass == 0) {
      share(before, 0);
      before = 0;
    }
  }
  sync_finders<kBarrier>();
  at.sequence = scratch.sequence;
  at.seq = scratch.seq;
  at.offset = scratch.offset;
  return at;
}

template <int kBarrier = 0, bool kLines = false, int kBlock>
__device__ inline SharePosition find_share(const Problem& p, PlanScratchOf<kBlock>& scratch) {
  return find_share<kBarrier, kLines>(p, scratch, gridDim.x);
}

// Where the sums of a segment go that are not all of it: to the workspace.
struct LinePieces {
  static constexpr bool kInStages = false;  // do they lie where tiles were?
  const Problem& p;

  static __device__ void open() {}  // before the first of a segment
  __device__ void leave_stats(const Unit& u, int row, float2 x) const { p.partial_stats[place(u, row)] = x; }
  __device__ void leave_sums(const Unit& u, int row, int d, float4 x) const {  // of neighbouring dimensions
    *reinterpret_cast<float4*>(p.partial + place(u, row) * p.pitch + d) = x;
  }
  static __device__ void end_segment(const Unit&) {}

 private:
  __device__ int64_t place(const Unit& u, int row) const { return static_cast<int64_t>(u.slot) * p.rows + row; }
};

// A segment that a border of blocks cuts.
struct CutUnit {
  SegmentPieces cut;  // none: there is no such segment
  Unit unit;
};

// A block's first segment and its last.
struct LineEnds {
  CutUnit of[2];

  __device__ void clear() { of[0].cut.pieces = of[1].cut.pieces = 0; }
};

// Walks along this block's units.  It lies in shared memory, and one thread at a time moves it.
struct Walker {
  Unit unit;       // the next one
  int in_segment;  // units of this block in its segment, from `unit` on
  int left;        // places of this block after the segment
  Sequence seq;
  Extent extent;
  int sequence;
  int head;  // KV head * head tiles + head tile
  int query_tile;
  Shares shares;
  int64_t end;     // place after the share
  LineEnds* ends;  // or null, if another walker notes them

  __device__ void start(const Problem& p, const SharePosition& at, LineEnds* to) {
    unit.exists = false;
    ends = to;
    if (ends) ends->clear();
    shares = at.shares;
    if (at.block >= shares.blocks) return;
    const int64_t begin = shares.begin(at.block);
    end = shares.begin(at.block + 1);
    left = static_cast<int>(end - begin);
    enter_sequence(p, at.sequence, at.seq);
    const int64_t per_head = extent.units();
    const int of_line = at.offset < per_head ? 0 : static_cast<int>(divide(at.offset, per_head));
    head = of_line * shares.lines + shares.line;
    const int64_t offset = at.offset - of_line * per_head;
    int low = 0, high = extent.num_tiles;  // the last tile j with units_before(j) <= offset
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (extent.units_before(middle) <= offset ? low : high) = middle;
    }
    query_tile = low;
    enter_segment(p, static_cast<int>(offset - extent.units_before(low)), 2 * blockIdx.x);
    if (in_segment == 0) leave_segment(p);
  }

  __device__ void next(const Problem& p) {
    if (--in_segment == 0) {
      leave_segment(p);
    } else {
      unit.first_token += p.kv_tile;
      unit.begins = false;
      unit.first_chunk = unit.first_chunk && !unit.ends_chunk;
      set_ends(p);
    }
  }

  // From a segment, whose in_segment units the caller takes together, to the next.
  __device__ void next_segment(const Problem& p) { leave_segment(p); }

 private:
  __device__ void leave_segment(const Problem& p) {
    unit.exists = false;
    if (left <= p.lead) return;  // no unit of the next segment is this block's
    if (++query_tile == extent.num_tiles) {
      query_tile = 0;
      head += shares.lines;
      if (head >= p.a.num_kv_heads * p.head_tiles) {
        head = shares.line;
        do enter_sequence(p, sequence + 1, clamp_sequence(p, load_sequence(p, sequence + 1)));
        while (!takes(p, seq) && sequence < p.a.num_seqs);
      }
    }
    enter_segment(p, 0, 2 * blockIdx.x + 1);
  }

  __device__ void enter_sequence(const Problem& p, int s, const Sequence& of) {
    sequence = s;
    seq = of;
    extent = Extent(p, seq);
  }

  // From this place of the segment on.
  __device__ void enter_segment(const Problem& p, int place, int slot) {
    const int skipped = max(place - p.lead, 0);
    const int at = extent.first_place(query_tile) + skipped, rest = extent.end_place(query_tile) - at;
    const int all = skipped + p.lead + rest;    // of the segment, whoever has them
    const int64_t first = end - left - place;   // on the line
    const int places = min(left, all - place);  // in this share
    left -= places;
    const int here = places - max(p.lead - place, 0);  // with keys
    unit.sequence = sequence;
    unit.sequence_len = seq.len;
    unit.query_begin = seq.query_begin;
    unit.query_len = seq.query_len;
    unit.kv_head = p.by_head_tiles.quotient(head);
    unit.head_tile = head - unit.kv_head * p.head_tiles;
    unit.query_tile = query_tile;
    unit.first_token = max(at * p.place_tokens, extent.first_key(query_tile) & -p.kv_tile);
    const int end_token = min((at + here) * p.place_tokens, extent.last_key(query_tile) + 1);
    in_segment = here <= 0 ? 0 : (end_token - unit.first_token + p.kv_tile - 1) >> (31 - __clz(p.kv_tile));
    unit.first_key = extent.first_key(query_tile);
    unit.last_key = extent.last_key(query_tile);
    unit.slot = skipped == 0 && here == rest ? -1 : slot;
    unit.exists = in_segment > 0;
    unit.begins = unit.first_chunk = true;
    set_ends(p);
    if (ends && unit.exists && unit.slot >= 0) ends->of[unit.slot % 2] = {shares.pieces(first, all, p.lead), unit};
  }

  __device__ void set_ends(const Problem& p) {
    unit.ends = in_segment == 1;
    unit.ends_chunk =
        unit.ends || (p.a.batch_invariant && ((unit.first_token + p.kv_tile) & (p.place_tokens - 1)) == 0);
  }
};

}  // namespace pykv::attention
