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

  // ---- with batch_invariant: a warp has the parts of a chunk one after another ------------------------------------

  // A part's sums join those of the parts before it.
  static __device__ void end_part(State& state) {
    if (state.idle) return;
    auto& chunk = state.chunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(chunk.maximum[h], state.maximum[0][h]), base = base_of(top);
      const float old = power_of_2(chunk.maximum[h] - base), weight = power_of_2(state.maximum[0][h] - base);
      chunk.maximum[h] = top;
      chunk.sum[h] = fmaf(row_sum(state, 0, h), weight, chunk.sum[h] * old);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        for (int e = 2 * h; e < 2 * h + 2; ++e) chunk.o[n][e] = fmaf(state.o[0][n][e], weight, chunk.o[n][e] * old);
      }
    }
  }

  // Every second chunk waits in shared memory for the one after it, if there is room: the way to what is kept, and back, is long.
  // `waiting` is this thread's, in steps of kThreads.
  static constexpr int kWaiting = kD / 8 + 1;

  __device__ void end_chunk(const Unit& u, State& state, float4* waiting) const {
    if (state.idle) return;
    auto& chunk = state.chunk;
    if (S::kWaitingBytes > 0 && !u.ends && !chunk.one_waits) {
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
};

}  // namespace pykv::attention
