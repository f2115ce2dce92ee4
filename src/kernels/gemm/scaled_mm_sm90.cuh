// out = a b on Hopper's asynchronous matrix units (sm_90a), where rows of a and columns of b begin at multiples of 16 bytes.
//
// The first warpgroup of a block fills a ring of stages, 128 bytes of k each: one thread asks the copy engine for tiles of a and
// of b, the other warps bring the scales of blocks.  One or two warpgroups multiply them, 64 rows of a at a time.  Tiles of out
// follow one another: the ring is filled for the next while the last is written.
//
// Few rows: bound by reading b, once.  Tiles have so many columns that every multiprocessor has as much of b to read, and
// several blocks of k are multiplied at once, so that the ring empties as fast as it fills.
// Many rows: bound by the matrix units.  Sums of 128 of k are added in fp32 by one warpgroup while the other multiplies.
// Between them, by the L2: the blocks of a cluster have the same rows of a, and each reads a part of these for all.
//
// The same instruction serves any number of rows: what is added when does not depend on the tile.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma8.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv::scaled_mm {

// How sums are added while the matrix units go on: by warpgroups that take turns, or by each between its own products.
enum Overlap { kNone, kTurns, kRolling };

// kGroups warpgroups, each of kHalves times 64 rows.  kExact: sums of int8 that stay integers.
template <class Sum_, bool kExact_, int kGroups_, int kHalves_, int kColumns_, int kKilobytes, int kCluster_ = 1,
          int kBlocks_ = 1, int kPerSm_ = 1, Overlap kOverlap_ = kNone>
struct WarpgroupShape {
  using Sum = Sum_;
  static constexpr bool kExact = kExact_;
  static constexpr int kGroups = kGroups_, kHalves = kHalves_, kColumns = kColumns_;
  static constexpr int kCluster = kCluster_;  // blocks, beside each other along n
  static constexpr int kBlocks = kBlocks_;    // of k, multiplied at once
  static constexpr int kPerSm = kPerSm_;      // blocks of a multiprocessor
  static constexpr Overlap kOverlap = kExact ? kNone : kOverlap_;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64 * kGroups * kHalves, kRowBytes = kRows * kLine;
  static constexpr int kRingBytes = kKilobytes << 10;
  // Tiles of few rows or few columns are small.
  static constexpr int kMostStages = kRows == 64 ? kRingBytes / 6144 : kRingBytes / (kRowBytes + kColumns * kLine);
  static constexpr int kScales = kRows + 4;  // of a stage: those of rows, and of two blocks of columns
  // A warp writes its 16 rows in pieces of so many bytes.
  static constexpr int kPieceBytes = kColumns >= 64 ? 128 : kColumns * 2, kPitch = kPieceBytes + 16;
  static constexpr int kWarpBytes = 16 * kPitch;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kMostStages * kScales * 4 + kGroups * 4 * kWarpBytes;
  static constexpr bool kMovesRegisters =
      kHalves > 1 || kGroups > 2 || (kGroups * kPerSm == 2 && kColumns > 64 && (kPerSm > 1 || kOverlap == kRolling));
  // What the threads that multiply have then, and the others.
  static constexpr int kMany = kGroups > 2 ? 152 : kPerSm == 2 ? 216 : 224;
  static constexpr int kFew = kGroups * kPerSm > 2 || kPerSm == 2 ? 40 : 56;
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
  uint32_t groups;               // of kCluster tiles
  uint32_t columns_each;         // of a tile
  uint32_t lines, slice_lines;   // of a in a stage; what one block reads of them for its cluster
  uint32_t stages, stage_bytes;  // those are copied to each block
};

struct Ring {
  uint32_t data, full, empty;  // addresses in shared memory
  float* scales;
};

// Where the next stage lies, and the parity of the phase that its barriers are in.
struct Turn {
  uint32_t stages, stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The first row and column of this block's tile of a group.
template <class S>
__device__ void tile_of(const Operands& o, uint32_t group, int64_t& first_row, int64_t& first_column) {
  uint32_t row_tile, column_group;
  o.p.tile_of(group, row_tile, column_group);
  first_row = int64_t{row_tile} * S::kRows;
  first_column = (int64_t{column_group} * S::kCluster + blockIdx.x % S::kCluster) * o.columns_each;
}

template <class S>
__device__ void fill(const Operands& o, const Ring& ring) {
  const int blocks = static_cast<int>(o.p.args.blocks());
  const uint32_t rank = blockIdx.x % S::kCluster;
  Turn turn{o.stages};
#pragma unroll 1
  for (uint32_t group = blockIdx.x / S::kCluster; group < o.groups; group += gridDim.x / S::kCluster) {
    int64_t first_row, first_column;
    tile_of<S>(o, group, first_row, first_column);
    const int line = static_cast<int>(first_row) + static_cast<int>(rank * o.slice_lines);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      const uint32_t full = ring.full + turn.stage * 8, to = ring.data + turn.stage * o.stage_bytes;
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      cluster_expect(full, o.stage_bytes);
      copy_box(to + o.lines * kLine, o.columns, {block * kLine, static_cast<int>(first_column), 0}, full);
      if constexpr (S::kCluster > 1) {
        copy_box_to_all(to + rank * o.slice_lines * kLine, o.rows, {block * kLine, line, 0}, full,
                        (1 << S::kCluster) - 1);
      } else {
        copy_box(to, o.rows, {block * kLine, line, 0}, full);
      }
    }
  }
}

// The scales of blocks: warp `turn_of` of kFillers has every kFillers-th stage.
inline constexpr int kFillers = 3;

template <class S>
__device__ void fill_scales(const Operands& o, const Ring& ring, int turn_of) {
  const ScaledMmArgs& args = o.p.args;
  const int blocks = static_cast<int>(args.blocks()), lane = threadIdx.x % 32;
  const int64_t column_blocks = (args.n + ScaledMmArgs::kBlock - 1) / ScaledMmArgs::kBlock;
  Turn turn{o.stages};
  const auto put = [](float* to, const MmScales& s, int64_t along, int64_t block) {
    if (s.is_e8m0) {
      *to = scale_at(s, along, block);
    } else {
      cp_async_small<4>(shared_address(to), static_cast<const float*>(s.data) + along * s.along + block * s.block,
                        true);
    }
  };
#pragma unroll 1
  for (uint32_t group = blockIdx.x / S::kCluster; group < o.groups; group += gridDim.x / S::kCluster) {
    int64_t first_row, first_column;
    tile_of<S>(o, group, first_row, first_column);
    const int64_t column_block = min(first_column / ScaledMmArgs::kBlock + lane, column_blocks - 1);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      if (turn_of-- != 0) continue;
      turn_of = kFillers - 1;
      mbarrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
      float* const to = ring.scales + turn.stage * S::kScales;
#pragma unroll
      for (int line = lane; line < S::kRows; line += 32)
        if (first_row + line < args.m) put(to + line, args.a_scales, first_row + line, block);
      if (lane < 2) put(to + S::kRows + lane, args.b_scales, column_block, block);
      cp_async_arrive(ring.full + turn.stage * 8);
    }
  }
}

template <class S>
struct Multiplier {
  using Sum = typename S::Sum;
  static constexpr int kEach = S::kColumns / 2;  // sums of a lane and 64 rows
  static constexpr int kSums = S::kExact ? S::kHalves : S::kOverlap == kRolling ? 2 : S::kBlocks;

  const Operands& o;
  const Ring& ring;
  char* const staging;
  const int group;  // known to be uniform
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Turn turn{o.stages};
  int split;  // eights of columns before the second block of b's scales

  Sum sum[kSums][kEach];
  float total[S::kExact ? 1 : S::kHalves][kEach];

  __device__ int first_line(int half) const { return (group * S::kHalves + half) * 64; }

  __device__ void multiply(Sum (&into)[kEach], int half, uint32_t stage, bool anew) {
    const uint32_t at = ring.data + stage * o.stage_bytes;
    const uint64_t a = wgmma_matrix(at + first_line(half) * kLine, 8 * kLine);
    const uint64_t b = wgmma_matrix(at + o.lines * kLine, 8 * kLine);
    if constexpr (!S::kExact) wgmma_pin(into);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma8<Sum, S::kColumns>::ss(into, wgmma_further(a, 32 * step), wgmma_further(b, 32 * step), step > 0 || !anew);
    wgmma_commit();
  }

  __device__ void free(uint32_t stage) const {
    __syncwarp();
    const uint32_t empty = ring.empty + stage * 8;
    if constexpr (S::kCluster > 1) {
      // A release to the cluster would be a fence of the whole device; all that it is to order are the matrix units' reads, which
      // have ended.
      if (lane < S::kCluster)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(empty, lane)) : "memory");
    } else {
      if (lane == 0) mbarrier_arrive(empty);
    }
  }

  // Those of the lane's two rows times those of the columns before the split, and after it.
  __device__ void load_scales(int half, uint32_t stage, float (&scale)[2][2]) const {
    if (!o.p.args.in_blocks) {
      scale[0][0] = scale[0][1] = scale[1][0] = scale[1][1] = 1.0f;
      return;
    }
    const float* const from = ring.scales + stage * S::kScales;
    const float2 of_columns = *reinterpret_cast<const float2*>(from + S::kRows);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_row = from[first_line(half) + warp * 16 + 8 * i + lane / 4];
      scale[i][0] = of_row * of_columns.x;
      scale[i][1] = S::kStraddles ? of_row * of_columns.y : scale[i][0];
    }
  }

  __device__ void add(int half, const Sum (&from)[kEach], const float (&scale)[2][2]) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float factor = S::kStraddles && i / 4 >= split ? scale[i / 2 % 2][1] : scale[i / 2 % 2][0];
      total[half][i] = fmaf(factor, static_cast<float>(from[i]), total[half][i]);
    }
  }

  // The other warpgroup's products come first, or this one's: then one of them always has some to give the matrix units.
  __device__ void take_turn() const {
    if constexpr (S::kOverlap == kTurns) named_barrier_sync(1 + group, 256);
  }
  __device__ void give_turn() const {
    if constexpr (S::kOverlap == kTurns) named_barrier_arrive(2 - group, 256);
  }

  // A block of k that is summed while the one before is added.
  struct Pending {
    uint32_t stage;
    float scale[2][2];
  };
  __device__ void begin_block(Sum (&into)[kEach], Pending& pending) {
    pending.stage = turn.stage;
    mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
    multiply(into, 0, turn.stage, true);
    load_scales(0, turn.stage, pending.scale);
    turn.next();
  }
  template <int kLater>
  __device__ void end_block(Sum (&from)[kEach], const Pending& pending) {
    wgmma_wait<kLater>();
    wgmma_pin(from);
    free(pending.stage);
    add(0, from, pending.scale);
  }
  __device__ void multiply_rolling(int blocks) {
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

  // kBlocks blocks of k, each of which is summed by itself.
  template <int kBlocks>
  __device__ void multiply_blocks() {
    uint32_t stages[kBlocks];
    if constexpr (S::kHalves == 1) {
      float scale[kBlocks][2][2];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b, turn.next()) {
        stages[b] = turn.stage;
        mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
        take_turn();
        multiply(sum[b], 0, turn.stage, true);
        give_turn();
        load_scales(0, turn.stage, scale[b]);
      }
      finish_blocks<0, kBlocks>(stages, scale);
    } else {
      static_assert(kBlocks == 1);
      mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
      float scale[S::kHalves][2][2];
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) load_scales(h, turn.stage, scale[h]);
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        take_turn();
        multiply(sum[0], h, turn.stage, true);
        give_turn();
        wgmma_wait<0>();
        wgmma_pin(sum[0]);
        if (h == S::kHalves - 1) free(turn.stage);
        add(h, sum[0], scale[h]);
      }
      turn.next();
    }
  }

  template <int kFirst, int kBlocks>
  __device__ void finish_blocks(const uint32_t (&stages)[kBlocks], const float (&scale)[kBlocks][2][2]) {
    if constexpr (kFirst < kBlocks) {
      wgmma_wait<kBlocks - 1 - kFirst>();
      wgmma_pin(sum[kFirst]);
      free(stages[kFirst]);
      add(0, sum[kFirst], scale[kFirst]);
      finish_blocks<kFirst + 1, kBlocks>(stages, scale);
    }
  }

  __device__ void multiply_all(int blocks) {
    if constexpr (S::kExact) {
      uint32_t last = 0;
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, turn.next()) {
        mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) multiply(sum[h], h, turn.stage, block == 0);
        wgmma_wait<S::kHalves>();
        if (block > 0) free(last);
        last = turn.stage;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) wgmma_pin(sum[h]);
      free(last);
    } else {
#pragma unroll
      for (auto& part : total)
#pragma unroll
        for (float& x : part) x = 0.0f;
      if constexpr (S::kOverlap == kRolling) {
        multiply_rolling(blocks);
        return;
      }
      int block = 0;
#pragma unroll 1
      for (; block + S::kBlocks <= blocks; block += S::kBlocks) multiply_blocks<S::kBlocks>();
      if constexpr (S::kBlocks > 1) {
#pragma unroll 1
        for (; block < blocks; ++block) multiply_blocks<1>();
      }
    }
  }

  __device__ float result(int half, int i) const {
    if constexpr (S::kExact) {
      return __int_as_float(sum[half][i]);
    } else {
      return total[half][i];
    }
  }
  __device__ void set_result(int half, int i, float x) {
    if constexpr (S::kExact) {
      sum[half][i] = __float_as_int(x);
    } else {
      total[half][i] = x;
    }
  }

  // Numbers of columns: a lane has every 32nd, and gives them to those that ask for eight neighbours' two.
  static constexpr int kOfLane = (S::kColumns + 31) / 32;
  template <class T>
  static __device__ T of_column(const T (&of_lane)[kOfLane], int eight, int e) {
    return __shfl_sync(~0u, of_lane[eight / 4], eight % 4 * 8 + threadIdx.x % 4 * 2 + e);
  }

  // Makes results of the sums, as floats in their place.
  __device__ void finish(int64_t first_row, int64_t first_column) {
    const ScaledMmArgs& args = o.p.args;
    const auto column = [&](int i) { return min(first_column + 32 * i + lane, args.n - 1); };
    const auto row = [&](int h, int i) {
      return min(first_row + first_line(h) + warp * 16 + 8 * i + lane / 4, args.m - 1);
    };
    if constexpr (S::kExact) {
      if (args.azp_adj) {
        int32_t adj[kOfLane];
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) adj[i] = __ldg(args.azp_adj + column(i) * args.azp_adj_stride);
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            const int64_t azp = args.azp ? __ldg(args.azp + row(h, i / 2 % 2) * args.azp_stride) : 1;
            set_result(h, i, __ll2float_rn(sum[h][i] - azp * of_column(adj, i / 4, i % 2)));
          }
      } else {
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
          for (int i = 0; i < kEach; ++i) set_result(h, i, __int2float_rn(sum[h][i]));
      }
    }
    if (!args.in_blocks) {
      const auto* const of_rows = static_cast<const float*>(args.a_scales.data);
      const auto* const of_columns = static_cast<const float*>(args.b_scales.data);
      float b_scale[kOfLane], a_scale[S::kHalves][2];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) b_scale[i] = __ldg(of_columns + column(i) * args.b_scales.along);
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
        for (int i = 0; i < 2; ++i) a_scale[h][i] = __ldg(of_rows + row(h, i) * args.a_scales.along);
#pragma unroll
      for (int j = 0; j < kEach / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float scale = of_column(b_scale, j, e);
#pragma unroll
          for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              set_result(h, 4 * j + 2 * i + e, a_scale[h][i] * (scale * result(h, 4 * j + 2 * i + e)));
        }
    }
    if (args.bias) {
      float bias[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) bias[i] = bias_at(column(i));
#pragma unroll
      for (int j = 0; j < kEach / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float added = of_column(bias, j, e);
#pragma unroll
          for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i) set_result(h, 4 * j + 2 * i + e, result(h, 4 * j + 2 * i + e) + added);
        }
    }
  }

  __device__ float bias_at(int64_t column) const {
    const ScaledMmArgs& args = o.p.args;
    if (args.out_dtype == DType::kFloat32) return __ldg(static_cast<const float*>(args.bias) + column);
    const uint16_t bits = __ldg(static_cast<const uint16_t*>(args.bias) + column);
    return args.out_dtype == DType::kBFloat16 ? __uint_as_float(uint32_t{bits} << 16)
                                              : __half2float(__ushort_as_half(bits));
  }

  // Writes the 64 rows of a half, the warp's 16 by itself: by way of shared memory, a piece of the columns at a time.
  template <class T>
  __device__ void store(int half, int64_t first_row, int64_t first_column) const {
    constexpr int kPiece = S::kPieceBytes / sizeof(T), kEight = kPiece / 8;  // columns of a piece
    constexpr int kChunk = 16 / sizeof(T), kChunks = kPiece / kChunk;
    const ScaledMmArgs& args = o.p.args;
    const int64_t warp_row = first_row + first_line(half) + warp * 16;
    const int rows = static_cast<int>(min(args.m - warp_row, int64_t{16}));
    const int columns = static_cast<int>(min(args.n - first_column, int64_t{o.columns_each}));
    if (rows <= 0) return;
    T* const out = static_cast<T*>(args.out) + warp_row * args.out_stride + first_column;
#pragma unroll
    for (int piece = 0; piece < S::kColumns; piece += kPiece) {
#pragma unroll
      for (int j = 0; j < kEight; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = piece / 2 + 4 * j + 2 * i;
          char* const to = staging + (8 * i + lane / 4) * S::kPitch + (8 * j + lane % 4 * 2) * sizeof(T);
          *reinterpret_cast<Vec<T, 2>*>(to) = round_to<T>(Vec<float, 2>{result(half, at), result(half, at + 1)});
        }
      __syncwarp();
#pragma unroll
      for (int i = lane; i < 16 * kChunks; i += 32) {
        const int r = i / kChunks, c = i % kChunks, column = piece + c * kChunk;
        const char* const from = staging + r * S::kPitch + c * 16;
        T* const to = out + r * args.out_stride + column;
        if (r >= rows || column >= columns) continue;
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
    const int blocks = static_cast<int>(o.p.args.blocks());
    if (group == 1) give_turn();  // the other one begins
#pragma unroll 1
    for (uint32_t tiles = blockIdx.x / S::kCluster; tiles < o.groups; tiles += gridDim.x / S::kCluster) {
      int64_t first_row, first_column;
      tile_of<S>(o, tiles, first_row, first_column);
      if constexpr (S::kStraddles)
        split = static_cast<int>(ScaledMmArgs::kBlock - first_column % ScaledMmArgs::kBlock) / 8;
      multiply_all(blocks);
      finish(first_row, first_column);
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        if (o.p.args.out_dtype == DType::kBFloat16)
          store<bf16>(h, first_row, first_column);
        else if (o.p.args.out_dtype == DType::kFloat16)
          store<half>(h, first_row, first_column);
        else
          store<float>(h, first_row, first_column);
      }
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kPerSm) scaled_mm_sm90_kernel(const __grid_constant__ Operands o) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 unaligned[];
  __shared__ uint64_t barriers[2 * S::kMostStages];
  const uint32_t start = shared_address(unaligned), data = (start + 1023) / 1024 * 1024;
  char* const after = reinterpret_cast<char*>(unaligned) + (data - start) + S::kRingBytes;
  const Ring ring{data, shared_address(barriers), shared_address(barriers + S::kMostStages),
                  reinterpret_cast<float*>(after)};
  const bool in_blocks = o.p.args.in_blocks;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kMostStages; ++i) {
      mbarrier_init(ring.full + i * 8, in_blocks ? 1 + 32 : 1);
      mbarrier_init(ring.empty + i * 8, 4 * S::kGroups * S::kCluster);
    }
    fence_async_proxy();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(o.rows);
    prefetch_map(o.columns);
  }
  __syncthreads();
  if constexpr (S::kCluster > 1) {  // all barriers are there
    cluster_announce();
    cluster_wait();
  }
  begin_dependent();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    if constexpr (S::kMovesRegisters) give_registers<S::kFew>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) fill<S>(o, ring);
    if (warp > 0 && in_blocks) fill_scales<S>(o, ring, warp - 1);
  } else {
    if constexpr (S::kMovesRegisters) take_registers<S::kMany>();
    const int group = warpgroup - 1;
    char* const staging = after + S::kMostStages * S::kScales * 4 + (group * 4 + threadIdx.x / 32 % 4) * S::kWarpBytes;
    Multiplier<S> multiplier{o, ring, staging, group};
    multiplier.run();
  }
  if constexpr (S::kCluster > 1) {  // nobody copies to this block any more, or arrives at its barriers
    __syncwarp();
    cluster_announce();
    cluster_wait();
  }
#endif
}

// Tiles of `columns_each` columns, at most kColumns, multiples of 8.
template <class S>
bool launch_shape(const ScaledMmArgs& args, const Launch& launch, int columns_each = S::kColumns) {
  constexpr int kCluster = S::kCluster;
  Operands o{{}, {}, Problem(args, S::kRows, columns_each), 0, 0, 0, 0, 0, 0};
  o.columns_each = static_cast<uint32_t>(columns_each);
  o.p.column_tiles = (o.p.column_tiles + kCluster - 1) / kCluster;  // groups of them
  o.groups = o.p.row_tiles * o.p.column_tiles;
  const auto size = static_cast<int64_t>(size_of(args.out_dtype));
  o.p.wide_out = is_aligned(16, args.out, {args.out_stride * size});
  constexpr int kLeast = 8 * kCluster;  // lines: each block's begin at a multiple of 1024 bytes
  const int lines = static_cast<int>(args.m < S::kRows ? (args.m + kLeast - 1) / kLeast * kLeast : S::kRows);
  o.lines = static_cast<uint32_t>(lines);
  o.slice_lines = static_cast<uint32_t>(lines / kCluster);
  o.stage_bytes = static_cast<uint32_t>((lines + columns_each) * kLine);
  o.stages = static_cast<uint32_t>(S::stages(static_cast<int>(o.stage_bytes)));
  const auto stride = [&](int64_t given, int64_t count) { return count > 1 ? given : (args.k + 15) / 16 * 16; };
  if (!make_tensor_map(o.rows, args.a, args.k, args.m, 1, stride(args.a_stride, args.m), 16, lines / kCluster) ||
      !make_tensor_map(o.columns, args.b, args.k, args.n, 1, stride(args.b_along_n, args.n), 16, columns_each))
    return false;
  // Clusters of four do not fill every group of multiprocessors.
  const auto most = static_cast<uint32_t>(num_sms(launch.device) * S::kPerSm / kCluster - (kCluster > 2 ? 1 : 0));
  const uint32_t blocks = (o.groups < most ? o.groups : most) * kCluster;
  const auto kernel = scaled_mm_sm90_kernel<S>;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes), "scaled_mm");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = kCluster > 1 ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, o), "scaled_mm");
  return true;
}

}  // namespace
}  // namespace pykv::scaled_mm
