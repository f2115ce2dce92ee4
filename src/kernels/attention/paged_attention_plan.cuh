// How the work of one call is divided, found by every block for itself from the lengths on the device.
//
// Unit of work: one KV tile (Problem::kv_tile tokens) against one query tile (up to Problem::rows rows, a row being a
// query token and a head).  All units of all sequences lie on one line, ordered by sequence, KV head, query tile, KV tile,
// and the blocks take equal shares of it.  A query tile's units are a segment; it has one place more, in front, that stands
// for the cost of beginning and ending it.  A segment cut by a border of blocks leaves partial results, at most two a
// block, added up in a fixed order by a second kernel or the last block (paged_attention_pieces.cuh): hence a grid and a
// workspace that depend on no length, no host synchronisation, and the same bits in every run.
//
// Kernels may ask for a line for each KV head, which blocks go along side by side: where neighbouring heads lie together, they are
// then read at about the same time.
//
// With batch_invariant a place is a chunk, some KV tiles whose sums are added up by themselves (paged_attention_exact.cuh),
// and there is none in front: chunks are too long to stand for that.
#pragma once

#include "attention/paged_attention_problem.cuh"

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

// Sum of clamp(start + j * step, 0, last) / place over 0 <= j < n.  Rare: kept out of the callers' code.
static __device__ __noinline__ int64_t sum_of_places(int64_t n, int64_t start, int64_t step, int last, int place) {
  if (step == 0) return n * divide(clamp(start, 0, last), place);
  const int64_t rising = min(n, start >= 0 ? 0 : divide(step - 1 - start, step));
  const int64_t flat = min(n, start >= last ? 0 : divide(last - start + step - 1, step));
  if (flat <= rising) return (n - rising) * divide(last, place);
  return floor_sum(flat - rising, place, step, start + rising * step) + (n - flat) * divide(last, place);
}

// The visible keys of each query tile of one sequence, in tokens and in places.
struct Extent {
  int tokens, place;  // query tokens in a tile, keys in a place
  int lead;           // places in front of a tile's
  int num_tiles;      // query tiles
  int last;           // the last key's index, or 0
  int high, low;      // of tile j: keys high + j * tokens and low + j * tokens, clamped, are its last and its first

  Extent() = default;
  __device__ Extent(const Problem& p, const Sequence& s) : tokens(p.tile_tokens), place(p.place_tokens), lead(p.lead) {
    num_tiles = (s.query_len + tokens - 1) / tokens;
    last = max(s.len - 1, 0);
    const int end = s.context() + tokens - 1;  // position of the first tile's last token
    high = p.a.causal ? end : p.window == kNoWindow ? last : min(end, kNoWindow) + p.window - 1;
    low = s.context() - p.window + 1;
    high_step = p.a.causal || p.window != kNoWindow ? tokens : 0;
  }

  __device__ int first_key(int j) const { return clamp_key(low + static_cast<int64_t>(j) * tokens); }
  __device__ int last_key(int j) const { return clamp_key(high + static_cast<int64_t>(j) * high_step); }
  __device__ int first_place(int j) const { return first_key(j) / place; }
  __device__ int end_place(int j) const { return last_key(j) / place + 1; }

  // Places on the line of query tiles 0 .. n - 1.  Even a tile without a visible key has a unit: its rows want zeros.
  __device__ int64_t units_before(int n) const {
    if (n == 0) return 0;
    if (n == 1) return lead + end_place(0) - first_place(0);
    return (1 + lead) * n + sum_of_places(n, high, high_step, last, place) - sum_of_places(n, low, tokens, last, place);
  }
  __device__ int64_t units() const { return units_before(num_tiles); }

 private:
  int high_step;

  __device__ int clamp_key(int64_t key) const { return static_cast<int>(clamp(key, 0, last)); }
};

// The line in equal shares; the first `longer` blocks have one place more.  `alike`: so many segments of the same length are
// all of the line, if not 0.  Some blocks less, which then have whole segments and leave no pieces, are quicker if they
// are nearly all.
struct Shares {
  int64_t units, each, longer;
  int blocks;

  Shares() = default;
  __device__ Shares(int64_t n, int most_blocks, int64_t alike)
      : units(n), blocks(static_cast<int>(min(n, static_cast<int64_t>(most_blocks)))) {
    if (alike > 0) {
      const int64_t of_block = divide(alike + most_blocks - 1, most_blocks), fewer = divide(alike, of_block);
      if (fewer * of_block == alike && fewer * 16 >= most_blocks * 15) blocks = static_cast<int>(fewer);
    }
    each = blocks ? divide(units, blocks) : 0;
    longer = units - each * blocks;
  }
  __device__ int64_t begin(int block) const { return block * each + min(static_cast<int64_t>(block), longer); }
  __device__ int block_of(int64_t unit) const {
    const int64_t in_longer = longer * (each + 1);
    return static_cast<int>(unit < in_longer ? divide(unit, each + 1) : longer + divide(unit - in_longer, each));
  }
};

struct SharePosition {
  Shares shares;  // of one line
  int lines;      // all heads on one, or one for each
  int sequence;   // in which this block's share begins
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
  for (int delta = 1; delta < 32; delta *= 2) {
    const int64_t below = __shfl_up_sync(~0u, x, delta);
    if (lane >= delta) x += below;
  }
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
  constexpr int kMostLines = 16, kFewestBlocks = 8, kLongShare = 16;
  return p.a.key.head < p.a.key.token && heads > 1 && heads <= kMostLines && heads * kFewestBlocks <= gridDim.x &&
         units * heads >= gridDim.x * kLongShare;
}

// Two passes over the lengths: the sum of all work, then the place where this block's share begins.
template <int kBarrier = 0, bool kLines = false, int kBlock>
__device__ inline SharePosition find_share(const Problem& p, PlanScratchOf<kBlock>& scratch) {
  int64_t heads = static_cast<int64_t>(p.a.num_kv_heads) * p.head_tiles;  // of a line
  const bool one_chunk = p.a.num_seqs <= kBlock;
  Shares shares{};
  int lines = 1;
  int64_t before = 0, begin = 0;  // in units of a head; on the line
  const auto share = [&](int64_t units, bool alike) {
    if (kLines && wants_lines(p, heads, units)) {
      lines = static_cast<int>(heads);
      heads = 1;
    }
    shares = Shares(units * heads, gridDim.x / lines, alike ? p.a.num_seqs * heads : 0);
    begin = shares.begin(blockIdx.x / lines);
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
        bool alike = false;
        if constexpr (kBarrier == 0) {
          alike = __syncthreads_and(s >= p.a.num_seqs || (one_tile && units * p.a.num_seqs == total));
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
      share(before, false);
      before = 0;
    }
  }
  sync_finders<kBarrier>();
  return {shares, lines, scratch.sequence, scratch.seq, scratch.offset};
}

// What a block needs to know of one unit, from the look-up of its pages to its arithmetic.
struct alignas(16) Unit {
  int sequence, sequence_len, query_begin, query_len;
  int kv_head, head_tile, query_tile;
  int first_token;          // of the KV tile
  int first_key, last_key;  // that some row of the query tile may see
  int slot;                 // where a partial result goes; -1: the whole segment is this block's
  bool exists;              // false after the block's last unit
  bool begins, ends;        // this block's part of the segment
  bool first_chunk;         // with batch_invariant: of that part
  bool ends_chunk;          // its sums leave the registers: it ends the part or, with batch_invariant, a chunk
};

// Walks along this block's units.  It lies in shared memory, and one thread at a time moves it.
struct Walker {
  Unit unit;       // the next one
  int in_segment;  // units of this block in its segment, from `unit` on
  int left;        // places of this block after the segment
  Sequence seq;
  Extent extent;
  int sequence;
  int head;         // KV head * head tiles + head tile
  int lines, line;  // this block's is one of so many, and has every so many-th head
  int query_tile;

  // Notes the first segment for the combining kernel if it began in an earlier block and ends in this one.
  __device__ void start(const Problem& p, const SharePosition& at) {
    const Shares& shares = at.shares;
    p.unfinished[blockIdx.x].first_block = -1;
    unit.exists = false;
    lines = at.lines;
    const int block = blockIdx.x / lines;
    line = blockIdx.x - block * lines;
    if (block >= shares.blocks) return;
    const int64_t begin = shares.begin(block);
    left = static_cast<int>(shares.begin(block + 1) - begin);
    enter_sequence(p, at.sequence, at.seq);
    const int64_t per_head = extent.units();
    const int of_line = static_cast<int>(divide(at.offset, per_head));
    head = of_line * lines + line;
    const int64_t offset = at.offset - of_line * per_head;
    int low = 0, high = extent.num_tiles;  // the last tile j with units_before(j) <= offset
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (extent.units_before(middle) <= offset ? low : high) = middle;
    }
    query_tile = low;
    const int place = static_cast<int>(offset - extent.units_before(low));
    const bool finishes = enter_segment(p, place, 2 * blockIdx.x);
    if (place > p.lead && finishes) {
      const int64_t first_unit = begin - place + p.lead;
      const int first = shares.block_of(first_unit);
      p.unfinished[blockIdx.x] = {first * lines + line, lines,         shares.begin(first) >= first_unit - p.lead,
                                  seq.query_begin,      seq.query_len, unit.kv_head,
                                  unit.head_tile,       query_tile};
    }
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
      head += lines;
      if (head >= p.a.num_kv_heads * p.head_tiles) {
        head = line;
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

  // From this place of the segment on.  Is its end in this block's share?
  __device__ bool enter_segment(const Problem& p, int place, int slot) {
    const int skipped = max(place - p.lead, 0);
    const int at = extent.first_place(query_tile) + skipped, rest = extent.end_place(query_tile) - at;
    const int places = min(left, skipped + p.lead + rest - place);  // of the segment in this share
    left -= places;
    const int here = place < p.lead ? places - p.lead : places;  // with keys
    const bool finishes = here == rest;
    unit.sequence = sequence;
    unit.sequence_len = seq.len;
    unit.query_begin = seq.query_begin;
    unit.query_len = seq.query_len;
    unit.kv_head = p.head_tiles == 1 ? head : head / p.head_tiles;
    unit.head_tile = head - unit.kv_head * p.head_tiles;
    unit.query_tile = query_tile;
    unit.first_token = at * p.place_tokens;
    int end = (at + here) * p.place_tokens;
    if (!p.in_parts) {
      unit.first_token = max(unit.first_token, extent.first_key(query_tile) & -p.kv_tile);
      end = min(end, extent.last_key(query_tile) + 1);
    }
    in_segment = here == 0 ? 0 : (end - unit.first_token + p.kv_tile - 1) >> (31 - __clz(p.kv_tile));
    unit.first_key = extent.first_key(query_tile);
    unit.last_key = extent.last_key(query_tile);
    unit.slot = skipped == 0 && finishes ? -1 : slot;
    unit.exists = in_segment > 0;
    unit.begins = unit.first_chunk = true;
    set_ends(p);
    return finishes;
  }

  __device__ void set_ends(const Problem& p) {
    unit.ends = in_segment == 1;
    unit.ends_chunk =
        unit.ends || (p.a.batch_invariant && ((unit.first_token + p.kv_tile) & (p.place_tokens - 1)) == 0);
  }
};

}  // namespace pykv::attention
