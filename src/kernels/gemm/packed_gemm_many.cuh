// Tiles of 128 rows of the weight times some tokens, for packed_gemm_many.cu.
#pragma once

#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"
#include "gemm/packed_codes.cuh"
#include "gemm/packed_epilogue.cuh"
#include "gemm/packed_gemm_many.h"
#include "gemm/tile_map.cuh"

namespace pykv {

// Where the rows of x and out lie; null: there is none.
struct TokenRows {
  const void* x;
  void* out;
  int64_t count, x_stride, x_step, out_stride;
  TileMap map;
  TileRows rows;

  template <class T>
  __device__ const T* of_x(int64_t token) const {
    const int64_t row = rows.row_of_out(map, token, count);
    return row >= 0 ? static_cast<const T*>(x) + rows.row_of_x(map, row) * x_stride : nullptr;
  }
  template <class T>
  __device__ T* of_out(int64_t row) const {
    return row >= 0 ? static_cast<T*>(out) + row * out_stride : nullptr;
  }
};

struct ManyRows {
  static constexpr int kSegments = 8, kUnit = PackedWeight::kUnit;
  static constexpr int kRows = 128, kBands = kRows / 32, kPitch = kRows + 4;
  static constexpr int kTogether = 8;  // tiles of tokens that pass over the weight together: they and it stay in the L2

  PackedWeight weight;
  TokenRows tokens;
  const void* bias;
  Epilogue epilogue;
  Divider groups_by;  // columns of a group
  uint32_t row_tiles, token_tiles;
  int bands, groups, blocks;  // of 32 rows; of columns; of 256 columns
  int steps;                  // of 16 columns that are scaled together: 1, 2 or 4
  bool whole_chunks;          // x: eight neighbours can be copied at once
  bool whole_stores;          // out: four neighbours can be stored at once

  __device__ void place(uint32_t block, int64_t& row_tile, int64_t& token_tile) const {
    const uint32_t together = row_tiles * kTogether, pass = block / together, in_pass = block % together;
    const uint32_t width = min(token_tiles - pass * kTogether, uint32_t{kTogether});
    row_tile = in_pass / width;
    token_tile = pass * kTogether + in_pass % width;
  }

  // The weight of a tile of tokens, -1: there is nothing to do.
  __device__ int32_t weight_of(int64_t token_tile, int tokens_of_tile) const {
    if (!tokens.map.rows) return 0;
    const int block = tokens.rows.tiles_of_block.quotient(static_cast<int>(token_tile));
    return tokens.map.weight_at(token_tile * tokens_of_tile, block);
  }

  // Columns of x from `column` on, wherever they lie.  shift: bytes from `weight` to the one that is meant.
  template <class T, int kCount>
  __device__ void load_one_by_one(uint32_t (&pairs)[kCount / 2], const T* row, int64_t column, int64_t shift) const {
    const auto* const columns = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(weight.columns) + shift);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int64_t from = column + i;
      if (weight.columns) from = __ldg(columns + from);
      const bool inside = row && from >= 0 && from < weight.k;
      const uint32_t bits = inside ? __ldg(reinterpret_cast<const unsigned short*>(row) + from * tokens.x_step) : 0;
      pairs[i / 2] = i % 2 == 0 ? bits : pairs[i / 2] | bits << 16;
    }
  }

  // Rounds sums [token][kPitch] to rows of out.
  template <class T>
  __device__ void write(const float* sums, int64_t first_row, int64_t first_token, int count, int threads,
                        int32_t of_weight) const {
    const int lane = threadIdx.x % 32;
    const int64_t n = first_row + lane * 4;
    const int rows = static_cast<int>(min(max(weight.n - n, int64_t{0}), int64_t{4}));
    float of_row[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (bias && i < rows)
        of_row[i] = to_float(static_cast<const T*>(bias)[of_weight * tokens.map.bias_stride + n + i]);
    for (int token = threadIdx.x / 32; token < count; token += threads / 32) {
      const int64_t row = tokens.rows.row_of_out(tokens.map, first_token + token, tokens.count);
      T* const to = tokens.of_out<T>(row);
      if (!to) continue;
      const float4 four = *reinterpret_cast<const float4*>(sums + token * kPitch + lane * 4);
      if (epilogue.any) {
        finish_four<T>(epilogue, static_cast<const T*>(bias), four, row, n, rows, tokens.out, tokens.out_stride);
        continue;
      }
      float v[4] = {four.x, four.y, four.z, four.w};
      if (bias)
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] += of_row[i];
      if (tokens.map.factors)
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] *= tokens.map.factor_of(row);
      if (whole_stores && rows == 4) {
        *reinterpret_cast<uint2*>(to + n) = make_uint2(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (i < rows) to[n + i] = from_float<T>(v[i]);
      }
    }
  }
};

// Copies factors of a unit of columns to a stage, where they stand as
//   scales, minima  [band of 32 rows][step of 16 columns][128 bytes], of the first step of each group alone
//   supers, lows    [band][64 bytes]
struct FactorFeed {
  static constexpr int kBands = ManyRows::kBands, kScalesAt = 0, kMinimaAt = kBands * 4 * 128;
  static constexpr int kSupersAt = 2 * kMinimaAt, kLowsAt = kSupersAt + kBands * 64, kBytes = kLowsAt + kBands * 64;

  // The part of one of 128 threads, of scales or of minima.
  static __device__ void copy(const ManyRows& p, uint32_t stage, int64_t row_tile, int unit, int thread, bool minima,
                              int64_t shift) {
    const PackedWeight& w = p.weight;
    const int bytes = minima ? bytes_of(w.minima_kind) : bytes_of(w.scales_kind);
    const int chunk = thread % 8, step = thread / 8 % 4;
    const uint8_t* const factors = minima ? w.minima : w.scales;
    if (factors && chunk < 2 * bytes && (step & (p.steps - 1)) == 0) {
      const int64_t band = min(static_cast<int>(row_tile) * kBands + thread / 32, p.bands - 1);
      const int group = p.groups_by.quotient(unit * ManyRows::kUnit + 16 * step);
      cp_async_16(stage + (minima ? kMinimaAt : kScalesAt) + thread * 16,
                  factors + shift + (band * p.groups + group) * (32 * bytes) + chunk * 16);
    }
    const uint8_t* const supers = minima ? w.lows : w.supers;
    if (supers && thread < 4 * kBands) {
      const int64_t band = min(static_cast<int>(row_tile) * kBands + thread / 4, p.bands - 1);
      cp_async_16(stage + (minima ? kLowsAt : kSupersAt) + thread * 16,
                  supers + shift + (band * p.blocks + unit / (256 / ManyRows::kUnit)) * 64 + thread % 4 * 16);
    }
  }
};

// Calls launch(problem, blocks) for tiles of so many tokens.
template <class Launcher>
void with_many_rows(const PackedGemmArgs& args, int tokens, Launcher&& launch) {
  const PackedWeight& w = args.weight;
  const TileMap& map = args.map;
  const int64_t token_tiles =
      map.rows ? map.num_blocks * (map.block_size / tokens) : (args.num_rows + tokens - 1) / tokens;
  const int64_t row_tiles = (w.n + ManyRows::kRows - 1) / ManyRows::kRows;
  if (row_tiles * token_tiles > INT32_MAX || row_tiles * ManyRows::kTogether > INT32_MAX)
    fail(PYKV_VALUE_ERROR, "x: has too many rows: %lld", static_cast<long long>(args.num_rows));
  const auto aligned = [](const void* pointer, int64_t stride, int count) {
    return reinterpret_cast<uintptr_t>(pointer) % (2 * count) == 0 && stride % count == 0;
  };
  const ManyRows p{.weight = w,
                   .tokens = {args.x, args.out, args.num_rows, args.x_stride, args.x_step, args.out_stride, map,
                              TileRows(map, tokens)},
                   .bias = args.bias,
                   .epilogue = args.epilogue,
                   .groups_by = Divider(w.group_size),
                   .row_tiles = static_cast<uint32_t>(row_tiles),
                   .token_tiles = static_cast<uint32_t>(token_tiles),
                   .bands = static_cast<int>(w.padded_n() / 32),
                   .groups = static_cast<int>(w.groups()),
                   .blocks = static_cast<int>((w.padded_k + 255) / 256),
                   .steps = w.steps_of_a_group(),
                   .whole_chunks = !w.columns && args.x_step == 1 && w.k % 8 == 0 && aligned(args.x, args.x_stride, 8),
                   .whole_stores = aligned(args.out, args.out_stride, 4)};
  launch(p, dim3(static_cast<unsigned>(row_tiles * token_tiles)));
}

}  // namespace pykv
