// What a block of scaled_mm_sm90.cuh computes, and the ring in shared memory that its warps share.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv::scaled_mm {

// What the matrix units have of a warpgroup while it adds sums.  kBatches: nothing, but several blocks of k are multiplied before.
// kRolling: the next block of k.
enum Pipeline { kBatches, kRolling };

// kGroups warpgroups, each of 64 rows.  kExact: sums of int8 that stay integers.
template <class Sum_, bool kExact_, int kGroups_, int kColumns_, Pipeline kPipeline_, int kBlocks_ = 1, int kPerSm_ = 1>
struct WarpgroupShape {
  using Sum = Sum_;
  static constexpr bool kExact = kExact_;
  static constexpr int kGroups = kGroups_, kColumns = kColumns_;
  static constexpr Pipeline kPipeline = kExact ? kBatches : kPipeline_;
  static constexpr int kBlocks = kExact ? 1 : kBlocks_;  // of k, that are multiplied at once
  static constexpr int kPerSm = kPerSm_;                 // blocks of a multiprocessor
  static constexpr int kCopiers =
      kGroups_ == 1 ? 2 : 1;  // warps that ask the copy engine: few rows come faster than one can ask
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64 * kGroups, kRowBytes = kRows * kLine;
  static constexpr int kRingBytes = (192 << 10) / kPerSm;
  // Tiles of few rows or few columns are small.
  static constexpr int kMostStages = kRows == 64 ? kRingBytes / 6144 : kRingBytes / (kRowBytes + kColumns * kLine);
  static constexpr int kScales = kRows + 4;  // of a stage: those of rows, and of two blocks of columns
  static constexpr int kScaleBytes = kMostStages * kScales * 4;
  // A warp writes its 16 rows in pieces of so many bytes.
  static constexpr int kPieceBytes = kColumns >= 64 ? 128 : kColumns * 2, kPitch = kPieceBytes + 16;
  static constexpr int kFactors = kColumns + 16;  // of the warp's columns and rows
  static constexpr int kWarpBytes = 16 * kPitch + kFactors * 4;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kScaleBytes + kGroups * 4 * kWarpBytes;
  static constexpr bool kMovesRegisters =
      kColumns > 128 || (kColumns > 64 && (kPerSm > 1 || (kGroups > 1 && kPipeline == kRolling)));
  // What the threads that multiply have then, and the others: together not more than all had before, or they wait forever.
  static constexpr int kMany = kPerSm == 2 ? 208 : 224, kFew = kPerSm == 2 ? 48 : 56;
  // Whether tiles may have fewer columns, and the last of one block of b's scales and the first of the next.
  static constexpr bool kStraddles = kRows == 64 || kColumns < 128;
  static_assert((kSharedBytes + 1024) * kPerSm <= 228 << 10 && kScales * 4 % 16 == 0);

  // As many stages as fit, the last of which has room for the rows that are multiplied although they do not exist.
  static int stages(int stage_bytes) {
    const int last = stage_bytes > kRowBytes ? stage_bytes : kRowBytes;
    const int fit = (kRingBytes - last) / stage_bytes + 1;
    return fit < kMostStages ? fit : kMostStages;
  }
};

namespace {

struct Operands {
  CUtensorMap rows, columns;
  Problem p;
  uint32_t columns_each;         // of a tile
  uint32_t lines;                // of a in a stage
  uint32_t stages, stage_bytes;  // those are copied
  bool are_joined;               // the matrices of groups are one of many lines, so many of them further on
  int rows_step, columns_step;
};

struct Ring {
  uint32_t data, full, empty;  // addresses in shared memory
  float* scales;
  const int32_t* before;  // count_tiles()
};

// Where the next stage lies, and the parity of the phase that its barriers are in.
struct Turn {
  uint32_t stages, stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Calls f(tile) for the tiles of this block.  kWarp: by whole warps, which learn from one of their threads how to go on.  Then the
// compiler knows that they stay together, and gives the matrix units their operands without asking each thread.
template <bool kWarp, class F>
__device__ void for_tiles(const Operands& o, const Ring& ring, F&& f) {
  const auto of_warp = [](uint32_t x) { return kWarp ? __shfl_sync(~0u, x, 0) : x; };
  const uint32_t tiles = of_warp(o.p.tiles(ring.before));
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile;
    uint32_t column_tile;
    const bool exists = o.p.tile_of(index, ring.before, tile, column_tile);
    if (of_warp(exists) == 0) continue;
    tile.first_column = int64_t{column_tile} * o.columns_each;
    f(tile);
  }
}

// Warp `mine` of kCopiers has every kCopiers-th stage.
template <class S>
__device__ void fill(const Operands& o, const Ring& ring, int mine) {
  const int blocks = static_cast<int>(o.p.args.blocks());
  const bool are_apart = o.p.args.groups.are_apart();
  Turn turn{o.stages};
  for_tiles<false>(o, ring, [&](const Tile& tile) {
    const int matrix = are_apart ? tile.group : 0;
    const int row = static_cast<int>(tile.first_row), column = static_cast<int>(tile.first_column);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      if (mine-- != 0) continue;
      mine = S::kCopiers - 1;
      const uint32_t full = ring.full + turn.stage * 8, to = ring.data + turn.stage * o.stage_bytes;
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      cluster_expect(full, o.stage_bytes);
      if (o.are_joined) {
        copy_box(to + o.lines * kLine, o.columns, {block * kLine, column + tile.group * o.columns_step}, full);
        copy_box(to, o.rows, {block * kLine, row + matrix * o.rows_step}, full);
      } else {
        copy_box(to + o.lines * kLine, o.columns, {block * kLine, column, tile.group}, full);
        copy_box(to, o.rows, {block * kLine, row, matrix}, full);
      }
    }
  });
}

// The scales of blocks: warp `mine` of kFillers has every kFillers-th stage.
template <class S>
inline constexpr int kFillers = 4 - S::kCopiers;

template <class S>
__device__ void fill_scales(const Operands& o, const Ring& ring, int mine) {
  const ScaledMmArgs& args = o.p.args;
  const int blocks = static_cast<int>(args.blocks()), lane = threadIdx.x % 32;
  const int64_t column_blocks = (args.n + ScaledMmArgs::kBlock - 1) / ScaledMmArgs::kBlock;
  const bool are_floats = !args.a_scales.is_e8m0 && !args.b_scales.is_e8m0;
  const auto copy = [&](float* to, const MmScales& s, int64_t along, int64_t block) {
    cp_async_small<4>(shared_address(to), static_cast<const float*>(s.data) + along * s.along + block * s.block, true);
  };
  Turn turn{o.stages};
  for_tiles<true>(o, ring, [&](const Tile& tile) {
    const MmScales a = args.a_scales.from(tile.group * args.a_scales.group),
                   b = args.b_scales.from(tile.group * args.b_scales.group);
    const int64_t column_block = min(tile.first_column / ScaledMmArgs::kBlock + lane % 2, column_blocks - 1);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      if (mine-- != 0) continue;
      mine = kFillers<S> - 1;
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      float* const to = ring.scales + turn.stage * S::kScales;
      if (are_floats) {
#pragma unroll
        for (int line = lane; line < S::kRows; line += 32)
          if (tile.first_row + line < tile.end_row) copy(to + line, a, tile.first_row + line, block);
        if (lane < 2) copy(to + S::kRows + lane, b, column_block, block);
        cp_async_arrive(ring.full + turn.stage * 8);
      } else {
#pragma unroll 1
        for (int line = lane; line < S::kRows; line += 32)
          if (tile.first_row + line < tile.end_row) to[line] = scale_at(a, tile.first_row + line, block);
        if (lane < 2) to[S::kRows + lane] = scale_at(b, column_block, block);
        mbarrier_arrive(ring.full + turn.stage * 8);
      }
    }
  });
}

}  // namespace
}  // namespace pykv::scaled_mm
