// Decoding proper: a warp's way along the line of paged_attention_plan.cuh, which it finds from the lengths by itself.
#pragma once

#include "attention/paged_attention_decode_load.cuh"
#include "attention/paged_attention_pieces.cuh"

namespace pykv::attention {

template <class S>
struct DecodeWalk : DecodeLoader<S> {
  using Base = DecodeLoader<S>;
  using Base::lane;
  using Base::length;
  using Base::p;
  static constexpr int kUnitTokens = S::kUnitTokens, kHeads = S::kHeads;

  LineShare& share;  // the block's

  // Where a warp is; all its lanes hold the same.
  struct Walk {
    int sequence, len, heads, tile;  // the segment's KV heads begin at heads * kHeads
    int units;                       // of this segment in this share, from `tile` on
    int left;                        // places of the share after the segment
    int slot;
    bool exists, begins;
    bool one_head;  // the line has one KV head, not all
  };

  // Of the KV heads of a segment on the line: their tiles and one more or, with batch_invariant, its chunks.
  static constexpr int kPlaceTokens = S::kInvariant ? kChunkTokens : kUnitTokens,
                       kPlaceUnits = kPlaceTokens / kUnitTokens;
  static constexpr int kLead = S::kInvariant ? 0 : 1;
  static __device__ int places(int len) { return kLead + max(1, (len + kPlaceTokens - 1) / kPlaceTokens); }

  // Each KV head has a line of its own, and the blocks go along the lines side by side, if there are few heads that lie
  // together in memory, shares have many places, and hardly a block is left over: neighbours are read at about the same time.
  static constexpr int kMostLines = !S::kInvariant || (S::kD == 128 && S::kColumns == 8 && !S::kPackedV) ? 8 : 1,
                       kLongShare = S::kInvariant ? 4 : 16;

  __device__ int all_heads() const { return p.a.num_kv_heads / kHeads; }

  __device__ bool wants_lines(int each) const {
    const int heads = all_heads();
    return heads > 1 && heads <= kMostLines && each >= kLongShare && p.a.key.head < p.a.key.token &&
           gridDim.x % heads * 64 <= gridDim.x;
  }

  // 128 sequences, four to a lane, and the places of a head before each.
  struct Scan {
    int len[4], before[4], total;
  };

  __device__ Scan scan(int base) const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    Scan x;
    x.total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int s = base + j * 32 + lane;
      x.len[j] = s < num_seqs ? length(s) : -1;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (base + j * 32 >= num_seqs) break;
      const int own = x.len[j] < 0 ? 0 : places(x.len[j]);
      int upto = own;
#pragma unroll 1
      for (int delta = 1; delta < 32; delta *= 2) {
        const int below = __shfl_up_sync(~0u, upto, delta);
        if (lane >= delta) upto += below;
      }
      x.before[j] = x.total + upto - own;
      x.total += __shfl_sync(~0u, upto, 31);
    }
    return x;
  }

  __device__ Walk start_line() const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    Scan x = scan(0);
    int total = x.total;
#pragma unroll 1
    for (int base = 128; base < num_seqs; base += 128) total += scan(base).total;
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
        const int at = begin - (before + x.before[j]) * heads, own = x.len[j] < 0 ? 0 : places(x.len[j]);
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
      w.heads += line;
      enter_segment(w, place, 2 * blockIdx.x);
      if (w.exists && w.slot >= 0) mine.head = mine.cut_at(begin - place, kLead, all, w.sequence, w.heads * kHeads);
    }
    if (threadIdx.x == 0) share = mine;
    return w;
  }

  // From this place of the segment on.
  static __device__ void enter_segment(Walk& w, int place, int slot) {
    w.tile = max(place - kLead, 0) * kPlaceUnits;
    const int all = places(w.len), here = min(w.left, all - place);
    w.left -= here;
    w.units = (place < kLead ? here - kLead : here) * kPlaceUnits;
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
      w.len = length(++w.sequence);
    }
    enter_segment(w, 0, 2 * blockIdx.x + 1);
  }
};

}  // namespace pykv::attention
