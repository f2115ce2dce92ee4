// The sums of a warp of scaled_mm_sm90.cuh, and what becomes of them: 16 rows of a tile of out.
#pragma once

#include "gemm/scaled_ring_sm90.cuh"

namespace pykv::scaled_mm {
namespace {

template <class S>
struct Sums {
  using Sum = typename S::Sum;
  static constexpr int kEach = S::kColumns / 2;  // sums of a lane
  static constexpr int kSums = S::kPipeline == kRolling ? 2 : S::kBlocks;
  // Numbers of columns: a lane has every 32nd, and gives them to those that have two neighbours of eight.
  static constexpr int kOfLane = (S::kColumns + 31) / 32;

  const Operands& o;
  const Ring& ring;
  char* const staging;
  Tile& kept;       // the warp's, in shared memory: registers are scarce
  const int group;  // known to be uniform
  const int blocks = static_cast<int>(o.p.args.blocks());
  const int first_line = group * 64 + threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32;  // the warp's 16 lines
  Turn turn{o.stages};
  int split;  // eights of columns before the second block of b's scales

  Sum sum[kSums][kEach];
  float total[S::kExact ? 1 : kEach];

  __device__ int64_t column_of_lane(const Tile& tile, int i) const {
    return min(tile.first_column + 32 * i + lane, o.p.args.n - 1);
  }
  __device__ int64_t row_of_lane(const Tile& tile, int i) const {
    return min(tile.first_row + first_line + 8 * i + lane / 4, tile.end_row - 1);
  }
  template <class T>
  static __device__ T of_column(const T (&of_lane)[kOfLane], int eight, int e) {
    return __shfl_sync(~0u, of_lane[eight / 4], eight % 4 * 8 + threadIdx.x % 4 * 2 + e);
  }

  // Scales of columns and rows are on their way to shared memory while products are summed.
  __device__ float* factors() const { return reinterpret_cast<float*>(staging + 16 * S::kPitch); }
  __device__ void load_factors(const Tile& tile) const {
    const ScaledMmArgs& args = o.p.args;
    if (args.in_blocks) return;
    const auto* const of_rows = static_cast<const float*>(args.a_scales.data) + tile.group * args.a_scales.group;
    const auto* const of_columns = static_cast<const float*>(args.b_scales.data) + tile.group * args.b_scales.group;
    const uint32_t to = shared_address(factors());
#pragma unroll
    for (int i = lane; i < S::kFactors; i += 32) {
      const bool is_column = i < S::kColumns;
      const int64_t column = min(tile.first_column + i, args.n - 1);
      const int64_t row = min(tile.first_row + first_line + i - S::kColumns, tile.end_row - 1);
      cp_async_small<4>(to + i * 4,
                        is_column ? of_columns + column * args.b_scales.along : of_rows + row * args.a_scales.along,
                        true);
    }
    cp_async_commit();
  }

  __device__ float bias_at(const Tile& tile, int64_t column) const {
    const ScaledMmArgs& args = o.p.args;
    const int64_t at = tile.group * args.bias_group + column;
    if (args.out_dtype == DType::kFloat32) return __ldg(static_cast<const float*>(args.bias) + at);
    const uint16_t bits = __ldg(static_cast<const uint16_t*>(args.bias) + at);
    return args.out_dtype == DType::kBFloat16 ? __uint_as_float(uint32_t{bits} << 16)
                                              : __half2float(__ushort_as_half(bits));
  }

  // Results lie where the sums were.
  __device__ float result(int i) const {
    if constexpr (S::kExact) {
      return __int_as_float(sum[0][i]);
    } else {
      return total[i];
    }
  }
  __device__ void set_result(int i, float x) {
    if constexpr (S::kExact) {
      sum[0][i] = __float_as_int(x);
    } else {
      total[i] = x;
    }
  }

  __device__ void finish(const Tile& tile) {
    const ScaledMmArgs& args = o.p.args;
    if constexpr (S::kExact) {
      if (args.azp_adj) {
        int32_t adj[kOfLane], azp[2] = {1, 1};
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) adj[i] = __ldg(args.azp_adj + column_of_lane(tile, i) * args.azp_adj_stride);
        if (args.azp) {
#pragma unroll
          for (int i = 0; i < 2; ++i) azp[i] = __ldg(args.azp + row_of_lane(tile, i) * args.azp_stride);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          set_result(i, __ll2float_rn(sum[0][i] - int64_t{azp[i / 2 % 2]} * of_column(adj, i / 4, i % 2)));
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) set_result(i, __int2float_rn(sum[0][i]));
      }
    }
    if (!args.in_blocks) {
      cp_async_wait<0>();
      __syncwarp();
      const float* const of_columns = factors();
      const float of_rows[2] = {of_columns[S::kColumns + lane / 4], of_columns[S::kColumns + 8 + lane / 4]};
#pragma unroll
      for (int j = 0; j < kEach / 4; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(of_columns + 8 * j + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          set_result(4 * j + i, of_rows[i / 2] * ((i % 2 ? pair.y : pair.x) * result(4 * j + i)));
      }
    }
    if (args.bias) {
      float bias[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) bias[i] = bias_at(tile, column_of_lane(tile, i));
#pragma unroll
      for (int j = 0; j < kEach / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float added = of_column(bias, j, e);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = 4 * j + 2 * i + e;
            set_result(at, result(at) + added);
          }
        }
    }
  }

  // Writes the warp's 16 rows: by way of shared memory, a piece of the columns at a time.
  template <class T>
  __device__ void store(const Tile& tile) const {
    constexpr int kPiece = S::kPieceBytes / sizeof(T), kEight = kPiece / 8;  // columns of a piece
    constexpr int kChunk = 16 / sizeof(T), kChunks = kPiece / kChunk;
    const ScaledMmArgs& args = o.p.args;
    const int64_t first = tile.first_row + first_line;
    const int columns = static_cast<int>(min(args.n - tile.first_column, int64_t{o.columns_each}));
    const int rows = static_cast<int>(min(tile.end_row - first, int64_t{16}));
    if (rows <= 0) return;
    uint32_t written = (2u << (rows - 1)) - 1;  // a bit for each row
    if (args.groups.of_rows.data) written = __ballot_sync(~0u, lane < rows && o.p.has_row(tile, first + lane));
    T* const out =
        static_cast<T*>(args.out) + tile.group * args.out_group + first * args.out_stride + tile.first_column;
#pragma unroll
    for (int piece = 0; piece < S::kColumns; piece += kPiece) {
#pragma unroll
      for (int j = 0; j < kEight; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = piece / 2 + 4 * j + 2 * i;
          char* const to = staging + (8 * i + lane / 4) * S::kPitch + (8 * j + lane % 4 * 2) * sizeof(T);
          *reinterpret_cast<Vec<T, 2>*>(to) = round_to<T>(Vec<float, 2>{result(at), result(at + 1)});
        }
      __syncwarp();
#pragma unroll
      for (int i = lane; i < 16 * kChunks; i += 32) {
        const int r = i / kChunks, c = i % kChunks, column = piece + c * kChunk;
        const char* const from = staging + r * S::kPitch + c * 16;
        T* const to = out + r * args.out_stride + column;
        if (column >= columns || (written >> r & 1) == 0) continue;
        if (o.p.wide_out && column + kChunk <= columns) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
          for (int e = 0; e < min(kChunk, columns - column); ++e) to[e] = reinterpret_cast<const T*>(from)[e];
        }
      }
      __syncwarp();
    }
  }
};

}  // namespace
}  // namespace pykv::scaled_mm
