// The pieces that blocks leave of a segment which a border cuts: how a block knows that those of others are there, and how the
// last of them adds them up.  No block waits for another, and there is no second kernel.
#pragma once

#include <cstdint>

#include "attention/cuda/rows.cuh"
#include "attention/cuda/schedule/line.cuh"

namespace pykv::attention {

// A segment in pieces.
struct CutSegment : SegmentPieces {
  int sequence, kv_head;
  int query_tile = 0;
};

// A block's share of a line.
struct alignas(16) LineShare {
  int each, longer;  // places of every block; so many have one more
  int lines, line;   // every `lines`-th block, from `line` on, is on this one
  int end;           // the place after the share
  CutSegment head;   // the block's first segment, if it is cut; or no pieces

  __device__ int block_of(int place) const {
    const int in_longer = longer * (each + 1);
    return place < in_longer ? place / (each + 1) : longer + (place - in_longer) / each;
  }

  // The segment of `all` places from `first_place` on, of which the first `lead` are no work.
  __device__ CutSegment cut_at(int first_place, int lead, int all, int sequence, int kv_head) const {
    const int first = block_of(first_place + lead), last = block_of(first_place + all - 1);
    return {{first * lines + line, last - first + 1, lines, first * each + min(first, longer) >= first_place},
            sequence,
            kv_head};
  }
};

// A number that no other call has and that hardly lies in any memory by chance: a block writes it to the place of each piece
// that it left.  So a workspace needs no clearing; only for a graph's next replay, which has the same number, the block that
// adds the pieces up clears these places.
uint64_t next_ticket();

// By one thread, after a barrier of those that wrote the pieces and before one of those that ask is_there(): of two blocks
// that do so, one at least sees the other's.
__device__ inline void hand_over_pieces(const Problem& p, int slot, int other_slot, uint64_t ticket) {
  const auto write = [&](int at) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p.tickets + at), "l"(ticket) : "memory");
  };
  __threadfence();
  if (slot >= 0) write(slot);
  if (other_slot >= 0) write(other_slot);
  asm volatile("fence.sc.gpu;" ::: "memory");
}

__device__ inline bool is_there(const Problem& p, int slot, uint64_t ticket) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(p.tickets + slot) : "memory");
  return x == ticket;
}

// All threads of a block, of those that look for pieces together.
struct WholeBlock {
  static __device__ int thread() { return threadIdx.x; }
  static __device__ int threads() { return blockDim.x; }
  static __device__ void sync() { __syncthreads(); }
  static __device__ bool all(bool x) { return __syncthreads_and(x) != 0; }
};

// Are all `count` pieces there, of which slot_of(k) is the k-th's?
template <class Team = WholeBlock>
__device__ bool are_there(const Problem& p, int count, auto&& slot_of, const Team& team = {}) {
  bool all = true;
  for (int k = team.thread(); k < count; k += team.threads()) all = all && is_there(p, slot_of(k), p.ticket);
  return team.all(all);
}

// They have been added up.
template <class Team = WholeBlock>
__device__ void forget(const Problem& p, int count, auto&& slot_of, const Team& team = {}) {
  for (int k = team.thread(); k < count; k += team.threads()) p.tickets[slot_of(k)] = 0;
}

// Four columns of a row, relative to 2^maximum, and the sum of its weights: 0 says that it saw nothing.  A maximum of -inf does not,
// for it leaves NaN out.
struct Quad {
  float maximum, sum;
  float4 o;

  static constexpr int kAtOnce = 8, kItems = 4;  // that a thread asks for together: pieces of an item, or items

  static __device__ Quad empty() { return {-INFINITY, 0, {0, 0, 0, 0}}; }
  // Past the L1: other blocks of this kernel may have written them.
  static __device__ Quad load(const Problem& p, int slot, int r, int quad) {
    const int64_t at = static_cast<int64_t>(slot) * p.rows + r;
    const float2 stats = __ldcg(p.partial_stats + at);
    return {stats.x, stats.y, __ldcg(reinterpret_cast<const float4*>(p.partial + at * p.pitch) + quad)};
  }

  __device__ void add(const Quad& x) {
    if (x.sum == 0) return;
    const float top = fmaxf(maximum, x.maximum);
    const float old = power_of_2(maximum - top), weight = power_of_2(x.maximum - top);
    maximum = top;
    sum = sum * old + x.sum * weight;
    o = {o.x * old + weight * x.o.x, o.y * old + weight * x.o.y, o.z * old + weight * x.o.z,
         o.w * old + weight * x.o.w};
  }

  __device__ Quad of_lane(int m) const {
    const auto other = [m](float x) { return __shfl_xor_sync(~0u, x, m); };
    return {other(maximum), other(sum), {other(o.x), other(o.y), other(o.z), other(o.w)}};
  }

  __device__ float4 finish(const Problem& p, const Row& row, int kv_head) const {
    const float factor = finish_row(p, row, kv_head, maximum, sum);
    return {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
  }
};

// Adds up `count` pieces, of which slot_of(k) is the k-th's, if all are there: items `first` to `end` - 1, each four columns of a row,
// which has `quads` of them.  A thread has kItems of them at once; kLanes neighbouring lanes share the pieces of an item.
// store(item, sum)
template <class Sum, int kItems = 1, int kLanes = 1, class Team = WholeBlock>
__device__ void join_pieces(const Problem& p, int count, auto&& slot_of, int quads, int first, int end, auto&& store,
                            const Team& team = {}) {
  if (!are_there(p, count, slot_of, team)) return;
  constexpr int kAtOnce = kItems * kLanes > 1 ? 4 : Sum::kAtOnce, kWarpItems = 32 / kLanes;
  const int lane = team.thread() % kLanes, step = team.threads() / kLanes;
  const int whole = first + (end - first + kWarpItems - 1) / kWarpItems * kWarpItems;  // whole warps shuffle
#pragma unroll 1
  for (int i = first + team.thread() / kLanes; i < whole; i += kItems * step) {
    int row[kItems], quad[kItems];
    Sum sum[kItems];
#pragma unroll
    for (int x = 0; x < kItems; ++x) {
      const int item = min(i + x * step, end - 1);
      row[x] = item / quads;
      quad[x] = item - row[x] * quads;
      sum[x] = Sum::empty();
    }
#pragma unroll 1
    for (int k0 = lane; k0 < count; k0 += kLanes * kAtOnce) {
      Sum piece[kItems][kAtOnce];
#pragma unroll
      for (int x = 0; x < kItems; ++x) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int k = k0 + j * kLanes;
          if (k < count && i + x * step < whole) piece[x][j] = Sum::load(p, slot_of(k), row[x], quad[x]);
        }
      }
#pragma unroll
      for (int x = 0; x < kItems; ++x) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (k0 + j * kLanes < count && i + x * step < whole) sum[x].add(piece[x][j]);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int x = 0; x < kItems; ++x) {
#pragma unroll
      for (int m = 1; m < kLanes; m *= 2) sum[x].add(sum[x].of_lane(m));
      if (lane == 0 && i + x * step < end) store(i + x * step, sum[x]);
    }
  }
  forget(p, count, slot_of, team);
}

// At the end of a share, when its pieces are written: hands them over, and adds up a segment that no other block has yet to hand over a
// piece of.  store(unit, row, d, sum): four columns from d on.
template <class Sum, class Team = WholeBlock>
__device__ void end_share(const Problem& p, const LineEnds& ends, auto&& store, const Team& team = {}) {
  team.sync();
  const int slot = 2 * blockIdx.x;
  const auto slot_of_cut = [&](int i) { return ends.of[i].cut.pieces > 0 ? slot + i : -1; };
  if (slot_of_cut(0) < 0 && slot_of_cut(1) < 0) return;
  if (team.thread() == 0) hand_over_pieces(p, slot_of_cut(0), slot_of_cut(1), p.ticket);
  team.sync();
#pragma unroll 1
  for (const CutUnit& of : ends.of) {
    if (of.cut.pieces == 0) continue;
    const Unit& u = of.unit;
    const int tokens = min(p.tile_tokens, u.query_len - u.query_tile * p.tile_tokens), quads = p.pitch / 4;
    join_pieces<Sum, Sum::kItems>(
        p, of.cut.pieces, [&](int i) { return of.cut.slot(i); }, quads, 0, tokens * p.tile_heads * quads,
        [&](int item, const Sum& sum) {
          const Row row = row_of(p, u, item / quads);
          if (row.valid) store(u, row, item % quads * 4, sum);
        },
        team);
  }
}

// ---- of clusters beside each other that share the keys of a KV head (decode/spans.cuh) --------------------------------

// The shape of clusters whose keys others may share.
template <class Shape>
struct Spanned : Shape {
  static constexpr bool kSpans = true;
};

// Of blocks that finish the same columns, one in each cluster, each has a slot of its own: where a block's columns begin within a
// query's, another block has the others.  The last one adds up; no block waits for another.
struct PiecesOfSpans {
  const Problem& p;
  int cluster_index, span, spans, rank;

  // Of the k-th cluster's block.
  __device__ int slot(int k) const { return (cluster_index - span + k) * p.cluster + rank; }

  // When all of the team's threads have left theirs: `count` items from `first` on, `quads` of them of a column.  store(item, sum)
  template <class Sum, class Team = WholeBlock>
  __device__ void join(int quads, int first, int count, auto&& store, const Team& team = {}) const {
    const auto slot_of = [this](int k) { return slot(k); };
    let_next_kernel_start();
    team.sync();
    if (team.thread() == 0) hand_over_pieces(p, slot(span), -1, p.ticket);
    team.sync();
    constexpr int kLanes = 4;  // each with every fourth piece
    join_pieces<Sum, 1, kLanes>(p, spans, slot_of, quads, first, first + count, store, team);
  }
};

}  // namespace pykv::attention
