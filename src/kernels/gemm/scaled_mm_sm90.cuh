// out = a b on Hopper's asynchronous matrix units (sm_90a), where rows of a and columns of b begin at multiples of 16 bytes.
//
// The first warpgroup of a block fills a ring of stages, 128 bytes of k each: one thread asks the copy engine for tiles of a and
// of b, the other warps bring the scales of blocks.  One or two warpgroups multiply, 64 rows of a at a time.  Tiles of out
// follow one another: the ring is filled for the next while the last is written.
//
// Few rows: bound by reading b, once.  Tiles have so many columns that every multiprocessor has as much of b to read, and
// several blocks of k are multiplied at once, so that the ring empties as fast as it fills.
// Many rows: bound by the matrix units, and by the warps, to whom adding sums of 8-bit products in fp32 is as much work.  The
// matrix units have a block of k to sum while the one before is added; or tiles are twice as wide and added one half at a time,
// while the other warpgroup multiplies.
//
// The same instruction serves any number of rows: what is added when does not depend on the tile.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma8.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv::scaled_mm {

// What the matrix units have of a warpgroup while it adds sums.  kBatches: nothing, but several blocks of k are multiplied before.
// kRolling: the next block of k.  kHalves: nothing; half of the columns are multiplied and added after the other.
enum Pipeline { kBatches, kRolling, kHalves };

// kGroups warpgroups, each of 64 rows.  kExact: sums of int8 that stay integers.
template <class Sum_, bool kExact_, int kGroups_, int kColumns_, Pipeline kPipeline_, int kBlocks_ = 1, int kPerSm_ = 1>
struct WarpgroupShape {
  using Sum = Sum_;
  static constexpr bool kExact = kExact_;
  static constexpr int kGroups = kGroups_, kColumns = kColumns_;
  static constexpr Pipeline kPipeline = kExact ? kBatches : kPipeline_;
  static constexpr int kBlocks = kExact ? 1 : kBlocks_;  // of k, that are multiplied at once
  static constexpr int kPerSm = kPerSm_;                 // blocks of a multiprocessor
  static constexpr int kParts = kPipeline == kHalves ? 2 : 1, kWidth = kColumns / kParts;
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

__device__ inline void fill(const Operands& o, const Ring& ring) {
  const int blocks = static_cast<int>(o.p.args.blocks());
  const bool are_apart = o.p.args.groups.are_apart();
  Turn turn{o.stages};
  for_tiles<false>(o, ring, [&](const Tile& tile) {
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      const uint32_t full = ring.full + turn.stage * 8, to = ring.data + turn.stage * o.stage_bytes;
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      cluster_expect(full, o.stage_bytes);
      copy_box(to + o.lines * kLine, o.columns, {block * kLine, static_cast<int>(tile.first_column), tile.group}, full);
      copy_box(to, o.rows, {block * kLine, static_cast<int>(tile.first_row), are_apart ? tile.group : 0}, full);
    }
  });
}

// The scales of blocks: warp `mine` of kFillers has every kFillers-th stage.
inline constexpr int kFillers = 3;

template <class S>
__device__ void fill_scales(const Operands& o, const Ring& ring, int mine) {
  const ScaledMmArgs& args = o.p.args;
  const int blocks = static_cast<int>(args.blocks()), lane = threadIdx.x % 32;
  const int64_t column_blocks = (args.n + ScaledMmArgs::kBlock - 1) / ScaledMmArgs::kBlock;
  const bool are_floats = !args.a_scales.is_e8m0 && !args.b_scales.is_e8m0;
  const auto put = [&](float* to, const MmScales& s, int64_t along, int64_t block) {
    if (are_floats) {
      cp_async_small<4>(shared_address(to), static_cast<const float*>(s.data) + along * s.along + block * s.block,
                        true);
    } else {
      *to = scale_at(s, along, block);
    }
  };
  Turn turn{o.stages};
  for_tiles<true>(o, ring, [&](const Tile& tile) {
    const MmScales a = args.a_scales.from(tile.group * args.a_scales.group),
                   b = args.b_scales.from(tile.group * args.b_scales.group);
    const int64_t column_block = min(tile.first_column / ScaledMmArgs::kBlock + lane % 2, column_blocks - 1);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      if (mine-- != 0) continue;
      mine = kFillers - 1;
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      float* const to = ring.scales + turn.stage * S::kScales;
#pragma unroll
      for (int line = lane; line < S::kRows; line += 32)
        if (tile.first_row + line < tile.end_row) put(to + line, a, tile.first_row + line, block);
      if (lane < 2) put(to + S::kRows + lane, b, column_block, block);
      if (are_floats) {
        cp_async_arrive(ring.full + turn.stage * 8);
      } else {
        mbarrier_arrive(ring.full + turn.stage * 8);
      }
    }
  });
}

template <class S>
struct Multiplier {
  using Sum = typename S::Sum;
  static constexpr int kEach = S::kColumns / 2, kOfPart = S::kWidth / 2;  // sums of a lane
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

  Sum sum[kSums][kOfPart];
  float total[S::kExact ? 1 : kEach];

  // A block of k that has been given to the matrix units.
  struct Pending {
    uint32_t stage;
    float scale[2][2];  // of the lane's two rows, times that of columns before the split, and after it
  };

  // A part of the columns, of a stage that has come if it is not the first.
  template <int kPart = 0>
  __device__ void multiply(Sum (&into)[kOfPart], bool anew) {
    const uint32_t at = ring.data + turn.stage * o.stage_bytes;
    const uint64_t a = wgmma_matrix(at + group * 64 * kLine, 8 * kLine);
    const uint64_t b = wgmma_matrix(at + (o.lines + kPart * S::kWidth) * kLine, 8 * kLine);
    if constexpr (kPart == 0) mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
    if constexpr (!S::kExact) wgmma_pin(into);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma8<Sum, S::kWidth>::ss(into, wgmma_further(a, 32 * step), wgmma_further(b, 32 * step), step > 0 || !anew);
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
      scale[i][1] = S::kStraddles || S::kParts > 1 ? of_row * of_columns.y : scale[i][0];
    }
  }

  __device__ void begin_block(Sum (&into)[kOfPart], Pending& pending) {
    pending.stage = turn.stage;
    multiply(into, true);
    load_scales(turn.stage, pending.scale);
    turn.next();
  }
  template <int kLater>
  __device__ void end_block(Sum (&from)[kOfPart], const Pending& pending) {
    wgmma_wait<kLater>();
    wgmma_pin(from);
    free(pending.stage);
#pragma unroll
    for (int i = 0; i < kOfPart; ++i) {
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

  // kPart's block of columns has scales of its own.
  template <int kPart>
  __device__ void add_part(const float (&scale)[2][2]) {
    wgmma_wait<0>();
    wgmma_pin(sum[0]);
    if constexpr (kPart == S::kParts - 1) free(turn.stage);
#pragma unroll
    for (int i = 0; i < kOfPart; ++i) {
      float& x = total[kPart * kOfPart + i];
      x = fmaf(scale[i / 2 % 2][kPart], static_cast<float>(sum[0][i]), x);
    }
  }
  __device__ void multiply_halves() {
    static_assert(S::kPipeline != kHalves || S::kWidth == ScaledMmArgs::kBlock);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      float scale[2][2];
      multiply<0>(sum[0], true);
      load_scales(turn.stage, scale);
      add_part<0>(scale);
      multiply<1>(sum[0], true);
      add_part<1>(scale);
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
      if constexpr (S::kPipeline == kHalves) {
        multiply_halves();
      } else if constexpr (S::kPipeline == kRolling) {
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

  __device__ int64_t column_of_lane(const Tile& tile, int i) const {
    return min(tile.first_column + 32 * i + lane, o.p.args.n - 1);
  }
  __device__ int64_t row_of_lane(const Tile& tile, int i) const {
    return min(tile.first_row + first_line + 8 * i + lane / 4, o.p.args.m - 1);
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
      const int64_t row = min(tile.first_row + first_line + i - S::kColumns, args.m - 1);
      cp_async_small<4>(to + i * 4,
                        is_column ? of_columns + column * args.b_scales.along : of_rows + row * args.a_scales.along,
                        true);
    }
    cp_async_commit();
  }

  __device__ float bias_at(int64_t column) const {
    const ScaledMmArgs& args = o.p.args;
    if (args.out_dtype == DType::kFloat32) return __ldg(static_cast<const float*>(args.bias) + column);
    const uint16_t bits = __ldg(static_cast<const uint16_t*>(args.bias) + column);
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
      for (int i = 0; i < kOfLane; ++i) bias[i] = bias_at(column_of_lane(tile, i));
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

  __device__ void run() {
    for_tiles<true>(o, ring, [&](const Tile& found) {
      if (lane == 0) kept = found;
      __syncwarp();
      const Tile& tile = kept;
      if constexpr (S::kStraddles)
        split = static_cast<int>(ScaledMmArgs::kBlock - tile.first_column % ScaledMmArgs::kBlock) / 8;
      load_factors(tile);
      multiply_all();
      finish(tile);
      if (o.p.args.out_dtype == DType::kBFloat16)
        store<bf16>(tile);
      else if (o.p.args.out_dtype == DType::kFloat16)
        store<half>(tile);
      else
        store<float>(tile);
      __syncwarp();
    });
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kPerSm) scaled_mm_sm90_kernel(const __grid_constant__ Operands o) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 unaligned[];
  __shared__ uint64_t barriers[2 * S::kMostStages];
  __shared__ Tile tiles[4 * S::kGroups];
  // Known to be uniform, and kept: they are not cheap to find again.
  const uint32_t start = __shfl_sync(~0u, shared_address(unaligned), 0), data = (start + 1023) / 1024 * 1024;
  char* const scales = reinterpret_cast<char*>(unaligned) + (data - start) + S::kRingBytes;
  char* const staging = scales + S::kScaleBytes;
  auto* const before = reinterpret_cast<int32_t*>(staging + S::kGroups * 4 * S::kWarpBytes);
  const uint32_t full = __shfl_sync(~0u, shared_address(barriers), 0);
  const Ring ring{data, full, full + S::kMostStages * 8, reinterpret_cast<float*>(scales), before};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kMostStages; ++i) {
      mbarrier_init(ring.full + i * 8, o.p.args.in_blocks ? 1 + 32 : 1);
      mbarrier_init(ring.empty + i * 8, 4 * S::kGroups);
    }
    fence_async_proxy();
    prefetch_map(o.rows);
    prefetch_map(o.columns);
  }
  __syncthreads();
  begin_dependent();
  if (o.p.counts_tiles()) count_tiles(o.p.args.groups, o.p.args.m, S::kRows, o.p.report_begins, before);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    if constexpr (S::kMovesRegisters) give_registers<S::kFew>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) fill(o, ring);
    if (warp > 0 && o.p.args.in_blocks) fill_scales<S>(o, ring, warp - 1);
  } else {
    if constexpr (S::kMovesRegisters) take_registers<S::kMany>();
    const int group = warpgroup - 1, warp = group * 4 + threadIdx.x / 32 % 4;
    Multiplier<S> multiplier{o, ring, staging + warp * S::kWarpBytes, tiles[warp], group};
    multiplier.run();
  }
#endif
}

// Tiles of `columns_each` columns, at most kColumns, multiples of 8.
template <class S>
bool launch_shape(const ScaledMmArgs& args, const Launch& launch, int columns_each = S::kColumns) {
  const RowGroups& groups = args.groups;
  const auto count = static_cast<int64_t>(groups.count > 0 ? groups.count : 1);
  Operands o{{}, {}, Problem(args, launch, S::kRows, columns_each), 0, 0, 0, 0};
  o.columns_each = static_cast<uint32_t>(columns_each);
  const auto size = static_cast<int64_t>(size_of(args.out_dtype));
  o.p.wide_out = is_aligned(16, args.out, {args.out_stride * size, args.out_group * size});
  const int lines = static_cast<int>(args.m < S::kRows ? (args.m + 7) / 8 * 8 : S::kRows);
  o.lines = static_cast<uint32_t>(lines);
  o.stage_bytes = static_cast<uint32_t>((lines + columns_each) * kLine);
  o.stages = static_cast<uint32_t>(S::stages(static_cast<int>(o.stage_bytes)));
  const auto stride = [&](int64_t given, int64_t lines_) { return lines_ > 1 ? given : (args.k + 15) / 16 * 16; };
  const auto group_stride = [&](int64_t given, int64_t matrices) { return matrices > 1 ? given : 16; };
  const int64_t matrices = groups.are_apart() ? count : 1;
  if (!make_tensor_map(o.rows, args.a, {args.k, args.m, matrices},
                       {stride(args.a_stride, args.m), group_stride(args.a_group, matrices)}, {lines, 1}) ||
      !make_tensor_map(o.columns, args.b, {args.k, args.n, count},
                       {stride(args.b_along_n, args.n), group_stride(args.b_group, count)}, {columns_each, 1}))
    return false;
  const auto most = static_cast<uint32_t>(num_sms(launch.device) * S::kPerSm);
  const uint32_t tiles = o.p.row_tiles * o.p.column_tiles;
  const size_t shared_bytes = S::kSharedBytes + (groups.count > 0 ? (count + 1) * 4 : 0);
  launch_dependent_shared(scaled_mm_sm90_kernel<S>, dim3(tiles < most ? tiles : most), dim3(S::kThreads), shared_bytes,
                          launch, "scaled_mm", o);
  return true;
}

}  // namespace
}  // namespace pykv::scaled_mm
