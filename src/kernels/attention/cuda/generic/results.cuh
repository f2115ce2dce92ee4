// The end of a segment: rows are finished and stored, or left for the combining kernel.
#pragma once

#include "attention/cuda/generic/softmax.cuh"
#include "attention/cuda/merge/exact.cuh"

namespace pykv::attention {

template <class S>
struct SegmentResults {
  using Softmax = RowSoftmax<S>;
  using State = typename Softmax::State;
  static constexpr int kD = S::kD;

  const Problem& p;
  Scratch<S>& scratch;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();

  // Column of o[.][n][e] (e 0 or 1) in the head.
  __device__ int column(int n, int e) const {
    const int c = lane % 4;
    return S::kPermutedOutput ? n / 2 * 16 + c * 4 + e * 2 + n % 2 : n * 8 + c * 2 + e;
  }

  // The sum of a row's weights.
  static __device__ float row_sum(const State& state, int i, int h) {
    float x = state.sum[i][h][0];
    if constexpr (S::kInvariant) x += state.sum[i][h][1];
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

  // Four neighbouring columns of this lane, from two column tiles, for the row half h.
  __device__ void for_each_four(const float (&o)[kD / 8][4], int h, auto&& body) const {
    const int c = lane % 4;
#pragma unroll
    for (int n = 0; n < kD / 8; n += 2) {
      const float a0 = o[n][2 * h], a1 = o[n][2 * h + 1], b0 = o[n + 1][2 * h], b1 = o[n + 1][2 * h + 1];
      if constexpr (S::kPermutedOutput) {
        body(n * 8 + 4 * c, float4{a0, b0, a1, b1});
      } else {  // lanes trade pairs: even ones take four columns of the first tile, odd ones of the second
        const bool odd = c & 1;
        const float send0 = odd ? a0 : b0, send1 = odd ? a1 : b1;
        const float got0 = __shfl_xor_sync(~0u, send0, 1), got1 = __shfl_xor_sync(~0u, send1, 1);
        const int d = n * 8 + (odd ? 8 : 0) + c / 2 * 4;
        body(d, odd ? float4{got0, got1, b0, b1} : float4{a0, a1, got0, got1});
      }
    }
  }

  // Sums of a part of a segment go to `pieces`, as in LinePieces.
  __device__ void end_segment_many(const Unit& u, State& state, const auto& pieces) {
    pieces.open();
    if (state.idle) return;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = warp * S::kWarpRows + i * 16 + h * 8 + lane / 4;
        const Row row = row_of(p, u, r);
        const float sum = row_sum(state, i, h);
        float factor = 1;
        if (u.slot < 0 && row.valid) factor = finish_row(p, row, u.kv_head, state.maximum[i][h], sum);
        if (u.slot >= 0 && row.valid && lane % 4 == 0) pieces.leave_stats(u, r, {state.maximum[i][h], sum});
        for_each_four(state.o[i], h, [&](int d, float4 x) {
          if (!row.valid) return;
          if (u.slot >= 0) {
            pieces.leave_sums(u, r, d, x);
          } else {
            store_output<S>(p, row, d, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
          }
        });
      }
    }
  }

  // ---- tiles of 64 rows with batch_invariant: a warp has the parts of a chunk one after another ----------------------

  // A part's sums join those of the parts before it.
  static __device__ void end_part(State& state) {
    if (state.idle) return;
    auto& chunk = state.chunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(chunk.maximum[h], state.maximum[0][h]), base = top == -INFINITY ? 0.f : top;
      const float old = power_of_2(chunk.maximum[h] - base), weight = power_of_2(state.maximum[0][h] - base);
      chunk.maximum[h] = top;
      chunk.sum[h] = fmaf(row_sum(state, 0, h), weight, chunk.sum[h] * old);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        for (int e = 2 * h; e < 2 * h + 2; ++e) chunk.o[n][e] = fmaf(state.o[0][n][e], weight, chunk.o[n][e] * old);
      }
    }
  }

  // Every second chunk waits in shared memory for the one after it: the way to what is kept, and back, is long.  `waiting`
  // is this thread's, in steps of kThreads.
  static constexpr int kWaiting = kD / 8 + 1;

  __device__ void end_chunk(const Unit& u, State& state, float4* waiting) const {
    if (state.idle) return;
    auto& chunk = state.chunk;
    if (!u.ends && !chunk.one_waits) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n)
        waiting[n * kThreads] = {chunk.o[n][0], chunk.o[n][1], chunk.o[n][2], chunk.o[n][3]};
      waiting[(kWaiting - 1) * kThreads] = {chunk.maximum[0], chunk.sum[0], chunk.maximum[1], chunk.sum[1]};
      Softmax::clear_chunk(state);
      chunk.one_waits = true;
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = warp * S::kWarpRows + h * 8 + lane / 4;
      const Row row = row_of(p, u, r);
      const auto half = [&](int n) { return reinterpret_cast<const float2*>(waiting + n * kThreads)[h]; };
      float2 first{-INFINITY, 0};
      float before[kD / 8][4];
      if (chunk.one_waits) first = half(kWaiting - 1);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        float2 x{0, 0};
        if (chunk.one_waits) x = half(n);
        before[n][2 * h] = x.x;
        before[n][2 * h + 1] = x.y;
      }
      float4 quads[kD / 16];
      int k = 0;
      for_each_four(before, h, [&](int, float4 x) { quads[k++] = x; });
      k = 0;
      for_each_four(chunk.o, h, [&](int d, float4 x) {
        const float4 y = quads[k++];
        if (!row.valid) return;
        // kept in memory; for a segment that is all this block's, the place of a last one is still free
        ExactQuad& kept = ExactQuad::at(p, u.slot < 0 ? 2 * blockIdx.x + 1 : u.slot, r, d / 4);
        const FinishedQuad done =
            add_chunks(p, u, row, r, d / 4, {first, y}, {{chunk.maximum[h], chunk.sum[h]}, x}, chunk.keeps, kept);
        if (done.is_finished) store_output<S>(p, row, d, done.x);
      });
    }
    Softmax::clear_chunk(state);
    chunk.one_waits = false;
    chunk.keeps = true;
  }

  // Where a row's column lies among the 16 rows that a warp leaves for others: 8-wide column tiles swizzled by row.
  static __device__ int row_place(int r, int d) { return (r * (kD / 8) + (d / 8 ^ (r & 7))) * 8 + d % 8; }

  // ---- tiles of 16 rows with batch_invariant: each warp has one part of a chunk ---------------------------------------

  // A warp's results, for others to add up.
  __device__ void leave_rows(int rows, const State& state, float* to) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = h * 8 + lane / 4;
      if (h * 8 >= rows) break;
      const float sum = row_sum(state, 0, h);
      if (lane % 4 == 0) scratch.stats[warp][r] = {state.maximum[0][h], sum};
      if (r >= rows) continue;
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        for (int e = 0; e < 2; ++e) to[row_place(r, column(n, e))] = state.o[0][n][2 * h + e];
      }
    }
  }

  // What a thread keeps of a segment's chunks.  No register is free; local memory stays near.
  static constexpr int kQuads = S::kMany ? 1 : 4 * kD / kThreads;

  // The four warps' results are added up through memory: each warp leaves its own in its ring at `stage_offset`, the stage
  // it is done with.
  __device__ void end_chunk_few(const Unit& u, const State& state, char* rings, int stage_offset,
                                ExactQuad (&kept)[kQuads]) const {
    static_assert(S::kStageBytes >= 16 * kD * 4);
    const int rows = min(p.tile_tokens, u.query_len - u.query_tile * p.tile_tokens) * p.tile_heads;
    float* mine = reinterpret_cast<float*>(rings + warp * S::kRingBytes + stage_offset);
    __syncwarp();  // all lanes have read what lay there
    leave_rows(rows, state, mine);
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < rows * (kD / 4); x += kThreads) {
      const int r = x / (kD / 4), d = x % (kD / 4) * 4;
      add_warps(u, r, d, rings + stage_offset + row_place(r, d) * 4, kept[x / kThreads]);
    }
    __syncthreads();  // the stages are free again
  }

  // Four columns of one row; `parts` are those of the first warp.
  __device__ void add_warps(const Unit& u, int r, int d, const char* parts, ExactQuad& kept) const {
    const Row row = row_of(p, u, r);
    if (!row.valid) return;
    PartsOfChunk sum;
    for (int w = 0; w < 4; ++w) {
      sum.add(scratch.stats[w][r], *reinterpret_cast<const float4*>(parts + w * S::kRingBytes));
    }
    const FinishedQuad done =
        add_chunks(p, u, row, r, d / 4, {{sum.maximum, sum.sum}, sum.o}, {}, !u.first_chunk, kept);
    if (done.is_finished) store_output<S>(p, row, d, done.x);
  }
};

}  // namespace pykv::attention
