// out^T = b^T a^T, with columns of b as first operand of mma.m16n8k32: few rows of a are the narrow side.
//
// The warps of a block share a tile of out, and a ring of tiles of 128 bytes of k in shared memory.  Nothing splits k: sums are
// added block of 128 by block, whatever the tile is.
#include "cuda/dependent_shared.cuh"
#include "cuda/mma8.cuh"
#include "cuda/workspace.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv {
namespace scaled_mm {
namespace {

// kColumnWarps x kRowWarps warps, each of 16 kColumnFragments columns of b and 8 kRowFragments rows of a.
template <class Sum_, int kColumnWarps_, int kRowWarps_, int kColumnFragments_, int kRowFragments_, int kStages_>
struct Shape {
  using Sum = Sum_;  // float: e4m3; int32_t: int8
  static constexpr bool kIsInt8 = std::is_same_v<Sum, int32_t>;
  static constexpr int kColumnWarps = kColumnWarps_, kRowWarps = kRowWarps_, kStages = kStages_;
  static constexpr int kColumnFragments = kColumnFragments_, kRowFragments = kRowFragments_;
  static constexpr int kThreads = 32 * kColumnWarps * kRowWarps;
  static constexpr int kColumns = 16 * kColumnFragments * kColumnWarps, kRows = 8 * kRowFragments * kRowWarps;
  static constexpr int kChunks = (kColumns + kRows) * 8;  // of 16 bytes, in a stage
  static constexpr int kStageBytes = kChunks * 16;
  static constexpr int kPitch = kColumns + 4;  // of the sums of a row: lanes of a warp meet all banks
  static constexpr int kSumBytes = kRows * kPitch * 4;
  static constexpr int kSharedBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static_assert(kRowFragments % 2 == 0 && kChunks % kThreads == 0 && 128 % kColumns == 0 && kSharedBytes <= 99 << 10);
};

template <class S>
class TileProduct {
  using Sum = typename S::Sum;

 public:
  __device__ TileProduct(const Problem& p, const Tile& tile, uint32_t ring) : p_(p), tile_(tile), ring_(ring) {}

  __device__ void run() {
    const int blocks = static_cast<int>(p_.args.blocks());
#pragma unroll 1
    for (int s = 0; s < S::kStages - 1; ++s) copy(s, blocks, s);
    int stage = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      cp_async_wait<S::kStages - 2>();
      __syncthreads();
      copy(block + S::kStages - 1, blocks, stage == 0 ? S::kStages - 1 : stage - 1);
      multiply(block, ring_ + stage * S::kStageBytes);
      if (++stage == S::kStages) stage = 0;
    }
    cp_async_wait<0>();
    __syncthreads();  // all have done with the ring
  }

  // [row][column]
  __device__ void put_sums(uint32_t* sums) const {
    const int lane = threadIdx.x % 32;
    const bool exact = S::kIsInt8 && !p_.args.in_blocks;
#pragma unroll
    for (int i = 0; i < S::kColumnFragments; ++i)
#pragma unroll
      for (int j = 0; j < S::kRowFragments; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = (column_warp() * S::kColumnFragments + i) * 16 + e / 2 * 8 + lane / 4;
          const int row = (row_warp() * S::kRowFragments + j) * 8 + lane % 4 * 2 + e % 2;
          uint32_t word = __float_as_uint(total_[i][j][e]);
          if constexpr (S::kIsInt8) word = exact ? static_cast<uint32_t>(sum_[i][j][e]) : word;
          sums[row * S::kPitch + column] = word;
        }
  }

 private:
  __device__ static int column_warp() { return threadIdx.x / 32 % S::kColumnWarps; }
  __device__ static int row_warp() { return threadIdx.x / 32 / S::kColumnWarps; }

  __device__ void copy(int block, int blocks, int stage) const {
    if (block < blocks)
      copy_lines<S::kColumns, S::kRows, S::kThreads>(
          p_.columns, p_.rows, tile_.group * p_.args.b_group, tile_.group * p_.args.a_group, tile_.first_column,
          tile_.first_row, ring_ + stage * S::kStageBytes, int64_t{block} * kLine, p_.args.k, threadIdx.x);
    cp_async_commit();
  }

  __device__ void multiply(int block, uint32_t stage) {
    float scale[S::kRowFragments][2];
    if (p_.args.in_blocks) load_scales(block, scale);
    const int lane = threadIdx.x % 32;
    const int column_line = column_warp() * S::kColumnFragments * 16 + lane % 16;
    const int row_line = S::kColumns + row_warp() * S::kRowFragments * 8 + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t rows[S::kRowFragments / 2][4];
#pragma unroll
      for (int j = 0; j < S::kRowFragments / 2; ++j)
        ldmatrix_x4(rows[j], stage + chunk_at(row_line + 16 * j, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < S::kColumnFragments; ++i) {
        uint32_t columns[4];
        ldmatrix_x4(columns, stage + chunk_at(column_line + 16 * i, 2 * step + lane / 16));
#pragma unroll
        for (int j = 0; j < S::kRowFragments; ++j)
          mma_16x8x32(sum_[i][j], columns, rows[j / 2][j % 2 * 2], rows[j / 2][j % 2 * 2 + 1]);
      }
    }
    if (S::kIsInt8 && !p_.args.in_blocks) return;
#pragma unroll
    for (int j = 0; j < S::kRowFragments; ++j) {
      constexpr float kUnit = S::kIsInt8 ? 1.0f : 1.0f / kE4M3Unit;
      const float factors[2] = {p_.args.in_blocks ? scale[j][0] * kUnit : kUnit,
                                p_.args.in_blocks ? scale[j][1] * kUnit : kUnit};
#pragma unroll
      for (int i = 0; i < S::kColumnFragments; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total_[i][j][e] = fmaf(factors[e % 2], static_cast<float>(sum_[i][j][e]), total_[i][j][e]);
          sum_[i][j][e] = 0;
        }
    }
  }

  // Those of a lane's rows, times that of the columns, which is one for the tile.
  __device__ void load_scales(int block, float (&scale)[S::kRowFragments][2]) const {
    const MmScales &a = p_.args.a_scales, &b = p_.args.b_scales;
    const float of_columns = scale_at(b.from(tile_.group * b.group), tile_.first_column / ScaledMmArgs::kBlock, block);
#pragma unroll
    for (int j = 0; j < S::kRowFragments; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t row = tile_.first_row + (row_warp() * S::kRowFragments + j) * 8 + threadIdx.x % 4 * 2 + e;
        scale[j][e] = of_columns * scale_at(a.from(tile_.group * a.group), min(row, p_.args.m - 1), block);
      }
  }

  const Problem& p_;
  const Tile& tile_;
  const uint32_t ring_;
  Sum sum_[S::kColumnFragments][S::kRowFragments][4] = {};
  float total_[S::kColumnFragments][S::kRowFragments][4] = {};
};

template <class S>
__global__ void __launch_bounds__(S::kThreads) scaled_mm_kernel(const __grid_constant__ Problem p) {
  extern __shared__ uint4 ring[];
  begin_dependent();
  auto* const before = reinterpret_cast<int32_t*>(ring);  // until the ring is filled
  if (p.counts_tiles()) count_tiles(p.args.groups, p.args.m, S::kRows, p.report_begins, before);
  if (blockIdx.x >= p.tiles(before)) return;
  __shared__ Tile tile;  // there, for registers are scarce
  bool exists = true;
  if (threadIdx.x == 0) {
    uint32_t column_tile;
    Tile found;
    exists = p.tile_of(blockIdx.x, before, found, column_tile);
    found.first_column = int64_t{column_tile} * S::kColumns;
    tile = found;
  }
  if (!__syncthreads_and(exists)) return;
  auto* const sums = reinterpret_cast<uint32_t*>(ring);
  {
    TileProduct<S> product(p, tile, shared_address(ring));
    product.run();
    product.put_sums(sums);
  }
  __syncthreads();
  store_tile<S::kRows, S::kColumns, S::kPitch, S::kThreads>(p, sums, tile, threadIdx.x);
}

template <class S>
void launch_shape(const ScaledMmArgs& args, const Launch& launch) {
  const Problem p(args, launch, S::kRows, S::kColumns);
  launch_dependent_shared(scaled_mm_kernel<S>, dim3(p.row_tiles * p.column_tiles), dim3(S::kThreads), S::kSharedBytes,
                          launch, "scaled_mm", p);
}

template <class Sum>
void launch_sum(const ScaledMmArgs& args, const Launch& launch) {
  const int64_t rows = args.groups.count > 0 ? args.groups.expected_rows : args.m;
  if (rows <= 16) return launch_shape<Shape<Sum, 2, 1, 1, 2, 12>>(args, launch);
  if (rows <= 64) return launch_shape<Shape<Sum, 2, 2, 1, 4, 8>>(args, launch);
  launch_shape<Shape<Sum, 2, 4, 4, 4, 3>>(args, launch);
}

__global__ void put_scales_kernel(float* to, float of_rows, float of_columns) {
  begin_dependent();
  to[0] = of_rows;
  to[1] = of_columns;
}

// Scales that lie on the host go to memory first: no product waits for which it is.
void launch_from_host(ScaledMmArgs args, const Launch& launch) {
  with_workspace(nullptr, 2 * sizeof(float), launch, "scaled_mm: scales", [&](void* memory) {
    auto* const to = static_cast<float*>(memory);
    float numbers[2] = {};
    const auto move = [&](MmScales& s, bool& on_host, int i) {
      if (!on_host) return;
      numbers[i] = *static_cast<const float*>(s.data);
      s.data = to + i;
      on_host = false;
    };
    move(args.a_scales, args.a_on_host, 0);
    move(args.b_scales, args.b_on_host, 1);
    launch_dependent(put_scales_kernel, dim3(1), dim3(1), launch, "scaled_mm", to, numbers[0], numbers[1]);
    scaled_mm_cuda(args, launch);
  });
}

}  // namespace
}  // namespace scaled_mm

void scaled_mm_cuda(const ScaledMmArgs& args, const Launch& launch) {
  if (args.a_on_host || args.b_on_host) return scaled_mm::launch_from_host(args, launch);
  if (scaled_mm::launch_sm90(args, launch)) return;
  if (args.is_int8) return scaled_mm::launch_sum<int32_t>(args, launch);
  scaled_mm::launch_sum<float>(args, launch);
}

}  // namespace pykv
