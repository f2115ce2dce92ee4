// The warpgroups of scaled_mm_sm90.cuh that multiply: 64 rows of a tile each.
#pragma once

#include "cuda/wgmma8.cuh"
#include "gemm/scaled_sums_sm90.cuh"

namespace pykv::scaled_mm {
namespace {

template <class S>
struct Multiplier : Sums<S> {
  using typename Sums<S>::Sum;
  using Sums<S>::kEach, Sums<S>::o, Sums<S>::ring, Sums<S>::kept, Sums<S>::group, Sums<S>::blocks, Sums<S>::first_line,
      Sums<S>::lane, Sums<S>::turn, Sums<S>::split, Sums<S>::sum, Sums<S>::total;

  // A block of k that has been given to the matrix units.
  struct Pending {
    uint32_t stage;
    float scale[2][2];  // of the lane's two rows, times that of columns before the split, and after it
  };

  __device__ void multiply(Sum (&into)[kEach], bool anew) {
    const uint32_t at = ring.data + turn.stage * o.stage_bytes;
    const uint64_t a = wgmma_matrix(at + group * 64 * kLine, 8 * kLine);
    const uint64_t b = wgmma_matrix(at + o.lines * kLine, 8 * kLine);
    mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
    if constexpr (!S::kExact) wgmma_pin(into);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma8<Sum, S::kColumns>::ss(into, wgmma_further(a, 32 * step), wgmma_further(b, 32 * step), step > 0 || !anew);
    wgmma_commit();
  }

  __device__ void free(uint32_t stage) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty + stage * 8);
  }

  __device__ void load_scales(uint32_t stage, float (&scale)[2][2]) const {
    if (!o.p.args.in_blocks) {
      scale[0][0] = scale[0][1] = scale[1][0] = scale[1][1] = 1.0f;
      return;
    }
    const float* const from = ring.scales + stage * S::kScales;
    const float2 of_columns = *reinterpret_cast<const float2*>(from + S::kRows);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_row = from[first_line + 8 * i + lane / 4];
      scale[i][0] = of_row * of_columns.x;
      scale[i][1] = S::kStraddles ? of_row * of_columns.y : scale[i][0];
    }
  }

  __device__ void begin_block(Sum (&into)[kEach], Pending& pending) {
    pending.stage = turn.stage;
    multiply(into, true);
    load_scales(turn.stage, pending.scale);
    turn.next();
  }
  template <int kLater>
  __device__ void end_block(Sum (&from)[kEach], const Pending& pending) {
    wgmma_wait<kLater>();
    wgmma_pin(from);
    free(pending.stage);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float factor = S::kStraddles && i / 4 >= split ? pending.scale[i / 2 % 2][1] : pending.scale[i / 2 % 2][0];
      total[i] = fmaf(factor, static_cast<float>(from[i]), total[i]);
    }
  }

  template <int kFirst, int kCount>
  __device__ void end_blocks(const Pending (&pending)[kCount]) {
    if constexpr (kFirst < kCount) {
      end_block<kCount - 1 - kFirst>(sum[kFirst], pending[kFirst]);
      end_blocks<kFirst + 1>(pending);
    }
  }
  template <int kCount>
  __device__ void multiply_blocks() {
    Pending pending[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) begin_block(sum[i], pending[i]);
    end_blocks<0>(pending);
  }

  __device__ void multiply_rolling() {
    Pending even, odd;
    begin_block(sum[0], even);
    int block = 1;
#pragma unroll 1
    for (; block + 1 < blocks; block += 2) {
      begin_block(sum[1], odd);
      end_block<1>(sum[0], even);
      begin_block(sum[0], even);
      end_block<1>(sum[1], odd);
    }
    if (block < blocks) {
      begin_block(sum[1], odd);
      end_block<1>(sum[0], even);
      end_block<0>(sum[1], odd);
    } else {
      end_block<0>(sum[0], even);
    }
  }

  // A block is multiplied while its predecessor's stage is given back.
  __device__ void multiply_exact() {
    uint32_t last = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      multiply(sum[0], block == 0);
      wgmma_wait<1>();
      if (block > 0) free(last);
      last = turn.stage;
    }
    wgmma_wait<0>();
    wgmma_pin(sum[0]);
    free(last);
  }

  __device__ void multiply_all() {
    if constexpr (S::kExact) {
      multiply_exact();
    } else {
#pragma unroll
      for (float& x : total) x = 0.0f;
      if constexpr (S::kPipeline == kRolling) {
        multiply_rolling();
      } else {
        int block = 0;
#pragma unroll 1
        for (; block + S::kBlocks <= blocks; block += S::kBlocks) multiply_blocks<S::kBlocks>();
        if constexpr (S::kBlocks > 1) {
#pragma unroll 1
          for (; block < blocks; ++block) multiply_blocks<1>();
        }
      }
    }
  }

  __device__ void run() {
    for_tiles<true>(o, ring, [&](const Tile& found) {
      if (lane == 0) kept = found;
      __syncwarp();
      const Tile& tile = kept;
      if constexpr (S::kStraddles)
        split = static_cast<int>(ScaledMmArgs::kBlock - tile.first_column % ScaledMmArgs::kBlock) / 8;
      this->load_factors(tile);
      multiply_all();
      this->finish(tile);
      if (o.p.args.out_dtype == DType::kBFloat16)
        this->template store<bf16>(tile);
      else if (o.p.args.out_dtype == DType::kFloat16)
        this->template store<half>(tile);
      else
        this->template store<float>(tile);
      __syncwarp();
    });
  }
};

}  // namespace
}  // namespace pykv::scaled_mm
