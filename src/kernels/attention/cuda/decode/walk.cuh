// Decoding proper: a warp's way along the line of schedule/line.cuh, which it finds from the lengths by itself.
#pragma once

#include "attention/cuda/decode/pages.cuh"
#include "attention/cuda/merge/pieces.cuh"

namespace pykv::attention {

template <class S>
struct DecodeWalk {
  static constexpr int kUnitTokens = S::kUnitTokens, kHeads = S::kHeads;

  const Problem& p;
  DecodePages<S> table;
  LineShare& share;  // the block's
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  // With kManyTokens: the sequence's query tokens, in so many tiles, of which each has segments of its own.
  struct Queries {
    int query_begin, query_len, query_tile, query_tiles;
  };
  struct OneQuery {};

  // Where a warp is; all its lanes hold the same.
  struct Walk : std::conditional_t<S::kManyTokens, Queries, OneQuery> {
    int sequence, len, heads;  // the segment's KV heads begin at heads * kHeads
    int skipped;               // units in front of the first that the query sees
    int tile;                  // from there on
    int units;                 // of this segment in this share, from `tile` on
    int left;                  // places of the share after the segment
    int slot;
    bool exists, begins;
    bool one_head;  // the line has one KV head, not all
  };

  // Of the segment's heads, this warp's.
  __device__ int kv_head(const Walk& w) const { return w.heads * kHeads + warp % kHeads; }

  // Of the KV heads of a segment on the line: their tiles and some more, as long as a beginning and an end take, or, with
  // batch_invariant, its chunks.
  static constexpr int kPlaceTokens = S::kInvariant ? kChunkTokens : kUnitTokens,
                       kPlaceUnits = kPlaceTokens / kUnitTokens;
  static constexpr int kLead = S::kLead;
  __device__ int places(int len) const {
    return kLead + max(1, (len + kPlaceTokens - 1) / kPlaceTokens - table.first_key(len) / kPlaceTokens);
  }

  __device__ int query_tiles(const Sequence& s) const {
    return takes(p, s) ? (s.query_len + p.tile_tokens - 1) / p.tile_tokens : 0;
  }

  // Of a KV head of sequence s.
  __device__ int all_places(int s, int len) const {
    if (len < 0) return 0;
    if constexpr (S::kManyTokens) return places(len) * query_tiles(clamp_sequence(p, load_sequence(p, s)));
    return places(len);
  }

  // Each KV head has a line of its own, and the blocks go along the lines side by side, if there are few heads that lie
  // together in memory, shares have many places, and hardly a block is left over: neighbours are read at about the same time.
  // Without it 64 x 8k takes 1 to 4 % longer, and of nvfp4, whose heads share sectors, a ninth more is read.
  static constexpr int kMostLines = !S::kInvariant || S::kD == 128 ? 8 : 1, kLongShare = S::kInvariant ? 4 : 16;

  __device__ int all_heads() const { return p.a.num_kv_heads / kHeads; }

  __device__ bool wants_lines(int each) const {
    const int heads = all_heads();
    return heads > 1 && heads <= kMostLines && each >= kLongShare && p.a.key.head < p.a.key.token &&
           gridDim.x % heads * 64 <= gridDim.x;
  }

  // 128 sequences, four to a lane, and the places of a head before each.
  struct Scan {
    int len[4], before[4], total;
    int longest;  // places of a head of a sequence
    bool
        descends;  // with kManyTokens: do cu_query_lens, so that the line could have too few places for all query tokens?
  };

  // By all lanes: do those of a lane's sequence s?
  __device__ bool descend(int s) const {
    if constexpr (!S::kManyTokens) return false;
    const RawSequence raw = load_sequence(p, s);
    return __any_sync(~0u, raw.end < raw.begin);
  }

  __device__ Scan scan(int base) const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    Scan x;
    x.total = x.longest = 0;
    x.descends = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int s = base + j * 32 + lane;
      x.len[j] = s < num_seqs ? table.length(s) : -1;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (base + j * 32 >= num_seqs) break;
      x.descends = x.descends || descend(base + j * 32 + lane);
      const int own = all_places(base + j * 32 + lane, x.len[j]);
      x.longest = max(x.longest, own);
      const int upto = inclusive_sum(own);
      x.before[j] = x.total + upto - own;
      x.total += __shfl_sync(~0u, upto, 31);
    }
    return x;
  }

  // Where few heads leave each block little, a long segment has so many pieces that adding them up takes longest: then fewer
  // blocks have more.  A place takes as long as six pieces.
  __device__ void share_among_fewer(int& blocks, int& each, int all, int longest) const {
    if (S::kInvariant || each >= kLongShare) return;  // chunks are long
    longest = __reduce_max_sync(~0u, longest);
    if (each * each * 6 >= longest || all == 0) return;
    blocks = min(blocks, max(1, all / (static_cast<int>(sqrtf(static_cast<float>(longest) / 6)) + 1)));
    each = all / blocks;
  }

  __device__ Walk start_line() const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    Scan x = scan(0);
    int total = x.total, longest = x.longest;
#pragma unroll 1
    for (int base = 128; base < num_seqs; base += 128) {
      const Scan more = scan(base);
      total += more.total;
      longest = max(longest, more.longest);
      x.descends = x.descends || more.descends;
    }
    if (x.descends) total = 0;  // reported at the end
    // `heads` on each of `lines`; of the line `line` this is share `block`.
    int heads = all_heads(), lines = 1, line = 0, block = blockIdx.x, blocks = gridDim.x;
    int each = p.by_grid.quotient(total * heads);
    if (wants_lines(each)) {
      lines = heads;
      heads = 1;
      blocks = gridDim.x / lines;
      block = blockIdx.x / lines;
      line = blockIdx.x - block * lines;
      each = total / blocks;
    }
    if (lines == 1) share_among_fewer(blocks, each, total * heads, longest);
    const int longer = total * heads - each * blocks;
    const int begin = block * each + min(block, longer);
    LineShare mine{each, longer, lines, line, begin + each + (block < longer), {}};
    Walk w{};
    w.one_head = lines > 1;
    w.left = block < blocks ? each + (block < longer) : 0;
    if (w.left > 0) {
      int before = 0;
#pragma unroll 1
      for (int base = 0; begin >= (before + x.total) * heads;) {
        before += x.total;
        x = scan(base += 128);
        w.sequence = base;
      }
      int place = 0, all = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (w.sequence + j * 32 >= num_seqs || all > 0) break;
        const int at = begin - (before + x.before[j]) * heads, own = all_places(w.sequence + j * 32 + lane, x.len[j]);
        const uint32_t hit = __ballot_sync(~0u, at >= 0 && at < own * heads);
        if (hit == 0) continue;
        const int from = __ffs(hit) - 1;
        w.sequence += j * 32 + from;
        w.len = __shfl_sync(~0u, x.len[j], from);
        place = __shfl_sync(~0u, at, from);
        all = places(w.len);
      }
      w.heads = static_cast<uint32_t>(place) / static_cast<uint32_t>(all);
      place -= w.heads * all;
      if constexpr (S::kManyTokens) {
        enter_queries(w);
        w.query_tile = w.heads / heads;
        w.heads -= w.query_tile * heads;
      }
      w.heads += line;
      enter_segment(w, place, 2 * blockIdx.x);
      if (w.exists && w.slot >= 0) mine.head = cut_at(w, mine, begin - place, all);
    }
    if (threadIdx.x == 0) share = mine;
    return w;
  }

  // The segment of w, of `all` places from `first_place` on.
  static __device__ CutSegment cut_at(const Walk& w, const LineShare& share, int first_place, int all) {
    CutSegment cut = share.cut_at(first_place, kLead, all, w.sequence, w.heads * kHeads);
    if constexpr (S::kManyTokens) cut.query_tile = w.query_tile;
    return cut;
  }

  __device__ void enter_queries(Walk& w) const {
    const Sequence s = clamp_sequence(p, load_sequence(p, w.sequence));
    w.query_begin = s.query_begin;
    w.query_len = s.query_len;
    w.query_tiles = query_tiles(s);
    w.query_tile = 0;
  }

  __device__ void next_sequence(Walk& w) const {
    ++w.sequence;
    if constexpr (S::kManyTokens) {
      enter_queries(w);
      while (w.query_tiles == 0 && w.sequence + 1 < p.a.num_seqs) {  // it has no place on the line
        ++w.sequence;
        enter_queries(w);
      }
    }
    w.len = table.length(w.sequence);
  }

  // From this place of the segment on.
  __device__ void enter_segment(Walk& w, int place, int slot) const {
    w.skipped = table.first_key(w.len) / kUnitTokens;
    w.tile = max(place - kLead, 0) * kPlaceUnits;
    const int all = places(w.len), here = min(w.left, all - place);
    w.left -= here;
    w.units = (here - max(kLead - place, 0)) * kPlaceUnits;
    w.slot = w.tile == 0 && place + here == all ? -1 : slot;
    w.exists = w.units > 0;
    w.begins = true;
  }

  __device__ void step(Walk& w) const {
    w.begins = false;
    ++w.tile;
    if (--w.units > 0) return;
    w.exists = false;
    if (w.left <= kLead) return;  // no tile of the next segment is this block's
    if (w.one_head || ++w.heads == all_heads()) {
      if (!w.one_head) w.heads = 0;
      bool is_last = true;  // of the sequence's query tiles
      if constexpr (S::kManyTokens) is_last = ++w.query_tile == w.query_tiles;
      if (is_last) next_sequence(w);
    }
    enter_segment(w, 0, 2 * blockIdx.x + 1);
  }
};

}  // namespace pykv::attention
