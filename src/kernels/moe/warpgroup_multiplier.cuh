// What empties the ring of expert_gemm_warpgroup.cu: warpgroups that multiply.
#pragma once

#include "cuda/wgmma_widths.cuh"
#include "moe/warpgroup_results.cuh"

namespace pykv {
namespace expert_gemm {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// A warpgroup that multiplies.
template <class S>
class Multiplier {
  using T = typename S::T;
  static constexpr int kTogether = S::kPairs % 16 == 0 ? 2 : 1;  // tiles of 8 pairs

 public:
  // rows: where it writes itself, room for those of a tile.
  __device__ Multiplier(const Operands& o, const Ring<S>& ring, const Results<S>& results, int group, int32_t* rows)
      : o_(o), ring_(ring), results_(results), group_(group), rows_(rows) {}

  __device__ void run() {
    const Tiles<S> tiles(o_);
    uint32_t row_tile = 0, pair_tile = 0;
    int32_t next = -1;
    if (tiles.first() < tiles.count) {
      tiles.place(tiles.first(), row_tile, pair_tile);
      next = tiles.expert(pair_tile);
    }
#pragma unroll 1
    for (uint32_t index = tiles.first(); index < tiles.count; index += tiles.step) {
      const uint32_t row_tile_here = row_tile, pair_tile_here = pair_tile;
      const int32_t expert = next;
      if (index + tiles.step < tiles.count) {
        tiles.place(index + tiles.step, row_tile, pair_tile);
        next = tiles.expert(pair_tile);
      }
      if (expert < 0) continue;
      int32_t own = -1;  // looked up while the ring is filled
      if (S::kWriters == 0 && thread_ < S::kPairs) own = tiles.row(pair_tile_here, thread_);
      multiply();
      finish(tiles, row_tile_here, pair_tile_here, expert, own);
    }
  }

 private:
  __device__ void multiply() {
#pragma unroll
    for (auto& half : sum_)
#pragma unroll
      for (float& x : half) x = 0.0f;
    wgmma_pin(sum_);
    int before = 0;
#pragma unroll 1
    for (int unit = 0; unit < o_.units; ++unit) {
      mbarrier_wait(ring_.full(turn_.stage), turn_.parity);
      fence_async_proxy();  // cp.async writes like an ordinary store
      const uint64_t weight = wgmma_matrix(ring_.weight(turn_.stage) + group_ * S::kHalves * 64 * kLine, 8 * kLine);
      const uint64_t x = wgmma_matrix(ring_.x(turn_.stage), 8 * kLine);
      wgmma_begin();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
          Wgmma<T, S::kPairs>::ss(sum_[h], wgmma_further(weight, h * 64 * kLine + 32 * step),
                                  wgmma_further(x, 32 * step), 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (unit > 0) free(before);
      before = turn_.stage;
      turn_.next(S::kStages);
    }
    wgmma_wait<0>();
    wgmma_pin(sum_);
    free(before);
  }

  __device__ void free(int stage) const {
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(ring_.empty(stage));
  }

  __device__ void finish(const Tiles<S>& tiles, uint32_t row_tile, uint32_t pair_tile, int32_t expert, int32_t own) {
    if (o_.p.a.bias) add_bias(row_tile, expert);
    if (o_.p.a.map.factors) multiply_by_factors(tiles, pair_tile);
    // What lay there has been written.
    if constexpr (S::kWriters != 0) {
      mbarrier_wait(results_.empty, written_ ^ 1);
      written_ ^= 1;
    } else {
      named_barrier_sync(1 + group_, 128);
      if (thread_ < S::kPairs) rows_[thread_] = own;
    }
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int first = 0; first < S::kPairs / 8; first += kTogether) {
        uint32_t pairs[2 * kTogether];
#pragma unroll
        for (int i = 0; i < 2 * kTogether; ++i)
          pairs[i] = pack_pair<T>(sum_[h][4 * first + 2 * i], sum_[h][4 * first + 2 * i + 1]);
        store_transposed(results_.chunk(group_, 8 * (first + lane_ / 16 % kTogether) + lane_ % 8,
                                        h * 8 + thread_ / 32 * 2 + lane_ / 8 % 2),
                         pairs);
      }
    if constexpr (S::kWriters != 0) {
      mbarrier_arrive(results_.full);
    } else {
      named_barrier_sync(1 + group_, 128);
      write_results(o_, results_, group_, row_tile, rows_);
    }
  }

  __device__ void add_bias(uint32_t row_tile, int32_t expert) {
    const ExpertGemmArgs& a = o_.p.a;
    const T* const bias = static_cast<const T*>(a.bias) + expert * a.map.bias_stride;
    const bool gated = o_.p.fusion.silu_and_mul;
    const int64_t width = o_.p.width();
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int band = (group_ * S::kHalves + h) * 4 + thread_ / 32;  // of 16 rows of the weight, in the tile
        const int64_t row = gated ? int64_t{row_tile} * (S::kRows / 2) + band * 8 + lane_ / 4
                                  : int64_t{row_tile} * S::kRows + band * 16 + i * 8 + lane_ / 4;
        const float own = row < width ? to_float(bias[gated ? i * width + row : row]) : 0.0f;
#pragma unroll
        for (int at = 2 * i; at < S::kPairs / 2; at += 4) {
          sum_[h][at] += own;
          sum_[h][at + 1] += own;
        }
      }
  }

  __device__ void multiply_by_factors(const Tiles<S>& tiles, uint32_t pair_tile) {
#pragma unroll
    for (int at = 0; at < S::kPairs / 2; at += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t row = tiles.row(pair_tile, at * 2 + lane_ % 4 * 2 + e);
        const float factor = row >= 0 ? o_.p.a.map.factor_of(row) : 0.0f;
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) {
          sum_[h][at + e] *= factor;
          sum_[h][at + 2 + e] *= factor;
        }
      }
  }

  const Operands& o_;
  const Ring<S>& ring_;
  const Results<S>& results_;
  const int group_, thread_ = threadIdx.x % 128, lane_ = threadIdx.x % 32;
  int32_t* const rows_;
  uint32_t written_ = 0;
  Turn turn_;
  float sum_[S::kHalves][S::kPairs / 2];
};

#endif

}  // namespace expert_gemm
}  // namespace pykv
