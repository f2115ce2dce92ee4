// What fills the ring of expert_gemm_warpgroup.cu.
#pragma once

#include "cuda/cluster.cuh"
#include "moe/warpgroup_ring.cuh"

namespace pykv {
namespace expert_gemm {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class S>
__device__ void copy_weight(const Operands& o, const Ring<S>& ring, int stage, int unit, uint32_t row_tile,
                            int32_t expert) {
  cluster_expect(ring.full(stage), S::kWeightBytes);
  const int column = unit * kLine, first = static_cast<int>(row_tile) * S::kRows;
  if (o.p.fusion.silu_and_mul)
    copy_box(ring.weight(stage), o.weight, {column, 0, 0, first / 16, expert}, ring.full(stage));
  else
    copy_box(ring.weight(stage), o.weight, {column, first, expert}, ring.full(stage));
}

// The threads that fill the ring.
template <class S>
class Filler {
  static constexpr int kStep = S::kFillers / 8, kEach = S::kPairs / kStep;  // pairs of a pass; of a thread

  struct Tile {
    uint32_t row_tile;
    int32_t expert;
    int32_t rows[kEach];  // of out
  };

 public:
  __device__ Filler(const Operands& o, const Ring<S>& ring, int thread)
      : o_(o), ring_(ring), chunk_(thread % 8), line_(thread / 8), first_(thread == 0) {}

  // Before the kernel before has ended: the map and the weights are those of an earlier one.
  __device__ void fill_early() {
    const Tiles<S> tiles(o_);
    if (!first_ || tiles.first() >= tiles.count) return;
    uint32_t row_tile, pair_tile;
    tiles.place(tiles.first(), row_tile, pair_tile);
    const int32_t expert = tiles.expert(pair_tile);
    if (expert < 0) return;
    early_ = min(o_.units, S::kStages);
#pragma unroll 1
    for (int unit = 0; unit < early_; ++unit) copy_weight(o_, ring_, unit, unit, row_tile, expert);
  }

  __device__ void run() {
    const Tiles<S> tiles(o_);
    Tile tile{0, -1, {}}, next{0, -1, {}};
    load(tiles, next, tiles.first());
#pragma unroll 1
    for (uint32_t index = tiles.first(); index < tiles.count; index += tiles.step) {
      tile = next;
#pragma unroll
      for (int i = 0; i < kEach; ++i)  // where there is none, another: nobody looks at its results
        x_[i] =
            static_cast<uint32_t>(tile.rows[i] < 0 ? 0 : o_.p.rows.top_k.quotient(tile.rows[i])) * o_.x_chunks + chunk_;
      load(tiles, next, index + tiles.step);
      if (tile.expert < 0) continue;
#pragma unroll 1
      for (int unit = 0; unit < o_.units; ++unit) {
        mbarrier_wait(ring_.empty(turn_.stage), turn_.parity ^ 1);
        if (first_) {
          if (early_ > 0)
            --early_;
          else
            copy_weight(o_, ring_, turn_.stage, unit, tile.row_tile, tile.expert);
        }
        copy_x(unit);
        turn_.next(S::kStages);
      }
    }
  }

 private:
  __device__ void load(const Tiles<S>& tiles, Tile& tile, uint32_t index) const {
    if (index >= tiles.count) return;
    uint32_t pair_tile;
    tiles.place(index, tile.row_tile, pair_tile);
    tile.expert = tiles.expert(pair_tile);
#pragma unroll
    for (int i = 0; i < kEach; ++i) tile.rows[i] = tiles.row(pair_tile, line_ + i * kStep);
  }

  __device__ void copy_x(int unit) const {
    const bool inside = unit * kUnit + chunk_ * 8 < o_.p.a.k;
    const auto* const from = static_cast<const uint4*>(o_.p.a.x) + unit * (kUnit / 8);
    const uint32_t to = ring_.x(turn_.stage);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int line = line_ + i * kStep;
      cp_async_16(to + line * kLine + ((chunk_ ^ line % 8) << 4), from + x_[i], inside);
    }
    cp_async_arrive(ring_.full(turn_.stage));
  }

  const Operands& o_;
  const Ring<S>& ring_;
  const int chunk_, line_;
  const bool first_;
  int early_ = 0;
  uint32_t x_[kEach];  // where rows begin, in chunks
  Turn turn_;
};

#endif

}  // namespace expert_gemm
}  // namespace pykv
