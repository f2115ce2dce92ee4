// out = a b with scales for many rows, and for rows in groups, on Hopper (sm_90a), of what is usual: fp8, no bias, and rows of out of
// two bytes an element that begin at multiples of 16 bytes.  The rest is scaled_mm_sm90.cuh's, with the same bits.
//
// How long it takes from the end of one product to the first instruction of the next decides how busy the matrix units are.  So
// stages and tiles have sizes that the compiler knows, addresses are in uniform registers, and scales of blocks come without a
// warp that waits for them: those of rows with the data, those of columns in registers, 32 blocks of k at a time.  Results are
// written by the copy engine while the next tile is multiplied.
//
// Of groups both warpgroups of a block have tiles and a ring of their own, so that one multiplies while the other finds its next tile
// or writes: k is short with many experts, and which rows a tile has is known from memory alone.
#include "cuda/cluster.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/load_shared.cuh"
#include "cuda/straight_ring.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma8.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv {
namespace scaled_mm {
namespace {

// What scales are of.  kLines: of rows and of columns, or of all.  kBlocks: of blocks of k, those of neighbouring rows side by side.
// kStridedBlocks: of blocks of k, which may lie anywhere, and warps of their own bring them.  kGroups: of lines or of blocks, and rows
// are in groups, each of which has a weight; a block has two teams.
enum class Scales { kLines, kBlocks, kStridedBlocks, kGroups };

// A team of kGroups warpgroups, each of kParts times 64 rows, and kColumns columns.  With one part the next block of k is multiplied while
// one is added.  With two there are no registers for that, and the other warpgroup multiplies; so it does with scales of blocks, where
// that is faster.
template <int kGroups_, int kParts_, int kStages_, int kPieces_, Scales kScalesOf, int kColumns_ = 128>
struct ManyShape {
  static constexpr bool kGrouped = kScalesOf == Scales::kGroups, kStrided = kScalesOf == Scales::kStridedBlocks;
  static constexpr bool kHasBlocks = kScalesOf != Scales::kLines;
  static constexpr int kGroups = kGroups_, kParts = kParts_, kStages = kStages_, kTeams = kGrouped ? 2 : 1;
  static constexpr int kRows = 64 * kGroups * kParts, kColumns = kColumns_;
  static constexpr int kWarps = 4 * kGroups * kTeams;  // that multiply
  static constexpr int kThreads = 32 * kWarps + 128;
  // Columns that a warp writes at once, and how many of them the last box of 64 has.
  static constexpr int kPieces = kPieces_, kPiece = (kColumns + 63) / 64 * 64 / kPieces,
                       kLastBox = (kColumns - 1) % 64 + 1;
  // Of a stage: those of rows, and where they are strided one of columns.  What the copy engine brings lies at multiples of 128 bytes,
  // and comes from multiples of 16: where a group may begin at any row, so many come that the tile's are among them.
  static constexpr int kScaleBox = kGrouped ? kRows + 4 : kRows;
  static constexpr int kScales = !kHasBlocks ? 0 : kStrided ? kRows + 4 : (kScaleBox + 31) / 32 * 32;
  // In shared memory.
  static constexpr uint32_t kRowBytes = kRows * kLine, kColumnBytes = kColumns * kLine, kWarpBytes = 16 * kPiece * 2;
  static constexpr uint32_t kColumnsAt = kStages * kRowBytes, kStagingAt = kColumnsAt + kStages * kColumnBytes;
  static constexpr uint32_t kScalesAt = kStagingAt + 4 * kGroups * kWarpBytes;
  static constexpr uint32_t kFullAt = (kScalesAt + kStages * kScales * 4 + 15) / 16 * 16,
                            kEmptyAt = kFullAt + kStages * 8;
  static constexpr uint32_t kTeamBytes = (kEmptyAt + kStages * 8 + 1023) / 1024 * 1024;
  static constexpr uint32_t kBytes = kTeams * kTeamBytes;  // and those of count_tiles()
  static_assert(kBytes + (kGrouped ? (RowGroups::kMost + 1) * 4 : 0) <= 227 << 10 && kPiece % 64 == 0 &&
                (kColumns == ScaledMmArgs::kBlock || (!kHasBlocks && kPiece == 64)));
};

struct ManyOperands {
  CUtensorMap rows, columns, out, row_scales;
  Problem p;
  int m, n, blocks;
  bool in_blocks, is_bfloat16;                         // in_blocks: read for groups alone
  int lines;                                           // rows of a tile, at most
  uint32_t band;                                       // of groups: see for_tiles()
  int rows_each, columns_each, out_each, scales_each;  // lines of the maps from a group to the next
  CUtensorMap out_last;                                // boxes of kLastBox columns
};

template <class S>
__device__ bool in_blocks(const ManyOperands& o) {
  return S::kGrouped ? o.in_blocks : S::kHasBlocks;
}

// Rows [row, end_row) of out, of a group's matrix if groups are apart.
struct ManyTile {
  int row, end_row, column, group;
};

[[maybe_unused]] __device__ inline float load_shared_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
  return x;
}

// Numbers that all lanes of a warp have in common: the compiler is to know.
template <bool kWarp>
__device__ int of_warp(int x) {
  return kWarp ? __shfl_sync(~0u, x, 0) : x;
}

// The rows of a tile, and their group.  False: there is nothing to do.
template <class S, bool kWarp>
__device__ bool find_rows(const ManyOperands& o, const int32_t* before, int row_tile, ManyTile& t) {
  const RowGroups& groups = o.p.args.groups;
  if (groups.of_rows.data) {
    static_assert(RowGroups::kNeighbours % S::kRows == 0);
    const int64_t group = groups.of_rows[t.row / RowGroups::kNeighbours * RowGroups::kNeighbours];
    if (group >= groups.count && t.column == 0) o.p.report_rows(group, groups.count);
    t.group = of_warp<kWarp>(group >= 0 && group < groups.count ? static_cast<int>(group) : -1);
    return t.group >= 0;
  }
  t.group = of_warp<kWarp>(group_of_tile(before, static_cast<int>(groups.count), row_tile));
  int64_t begin, end;
  groups.rows_of(t.group, o.m, begin, end, [](int64_t, int64_t) {});
  t.row = of_warp<kWarp>(static_cast<int>(begin) + (row_tile - before[t.group]) * S::kRows);
  t.end_row = of_warp<kWarp>(static_cast<int>(end));
  return true;
}

// Tiles that are worked on at the same time share lines in the L2: those of 2048 rows, or of a group, column by column.
template <class S, bool kWarp, class F>
__device__ void for_tiles(const ManyOperands& o, const int32_t* before, int team, F&& f) {
  const uint32_t most = S::kGrouped ? o.band : 16 / S::kParts;  // tiles of rows
  const uint32_t column_tiles = o.p.column_tiles;
  uint32_t row_tiles = o.p.row_tiles;
  if (S::kGrouped && o.p.counts_tiles()) row_tiles = of_warp<kWarp>(before[o.p.args.groups.count]);
#pragma unroll 1
  for (uint32_t index = blockIdx.x + team * gridDim.x; index < row_tiles * column_tiles;
       index += gridDim.x * S::kTeams) {
    const uint32_t band = index / (most * column_tiles), within = index - band * most * column_tiles;
    const uint32_t height = min(most, row_tiles - band * most);
    const int row_tile = static_cast<int>(band * most + within % height);
    const int row = row_tile * (S::kGrouped ? S::kRows : o.lines);
    ManyTile t{row, S::kGrouped ? o.m : min(o.m, row + o.lines), static_cast<int>(within / height * S::kColumns), 0};
    if constexpr (S::kGrouped)
      if (!find_rows<S, kWarp>(o, before, row_tile, t)) continue;
    f(t);
  }
}

template <class S>
__device__ void fill(const ManyOperands& o, uint32_t shared, const int32_t* before, int team) {
  StraightTurn<S::kStages> turn;
  const bool with_scales = !S::kStrided && in_blocks<S>(o);
  const uint32_t bytes = o.lines * kLine + S::kColumnBytes + (with_scales ? S::kScaleBox * 4 : 0);
  for_tiles<S, false>(o, before, team, [&](const ManyTile& t) {
    const int row = t.row + t.group * o.rows_each, column = t.column + t.group * o.columns_each;
    const int scales = t.group * o.scales_each;
#pragma unroll 1
    for (int block = 0; block < o.blocks; ++block, turn.next()) {
      const uint32_t full = shared + S::kFullAt + turn.stage * 8;
      wait_for(shared + S::kEmptyAt + turn.stage * 8, turn.parity ^ 1);
      cluster_expect(full, bytes);
      copy_box(shared + turn.stage * S::kRowBytes, o.rows, {block * kLine, row}, full);
      copy_box(shared + S::kColumnsAt + turn.stage * S::kColumnBytes, o.columns, {block * kLine, column}, full);
      if (with_scales)
        copy_box(shared + S::kScalesAt + turn.stage * S::kScales * 4, o.row_scales, {t.row & ~3, scales + block}, full);
    }
  });
}

// Warp `mine` of kFillers has every kFillers-th stage.
[[maybe_unused]] inline constexpr int kFillers = 3;

template <class S>
__device__ void fill_scales(const ManyOperands& o, uint32_t shared, int mine) {
  const int lane = threadIdx.x % 32;
  const auto copy = [&](uint32_t to, const MmScales& s, int64_t along, int block) {
    cp_async_small<4>(to, static_cast<const float*>(s.data) + along * s.along + block * s.block, true);
  };
  StraightTurn<S::kStages> turn;
  for_tiles<S, true>(o, nullptr, 0, [&](const ManyTile& t) {
#pragma unroll 1
    for (int block = 0; block < o.blocks; ++block, turn.next()) {
      if (mine-- != 0) continue;
      mine = kFillers - 1;
      wait_for(shared + S::kEmptyAt + turn.stage * 8, turn.parity ^ 1);
      const uint32_t to = shared + S::kScalesAt + turn.stage * S::kScales * 4;
#pragma unroll
      for (int line = lane; line < S::kRows; line += 32)
        if (t.row + line < o.m) copy(to + line * 4, o.p.args.a_scales, t.row + line, block);
      if (lane == 0) copy(to + S::kRows * 4, o.p.args.b_scales, t.column / ScaledMmArgs::kBlock, block);
      cp_async_arrive(shared + S::kFullAt + turn.stage * 8);
    }
  });
}

template <class S>
struct ManyMultiplier {
  static constexpr int kSums = S::kColumns / 2;  // of a lane, for 64 rows

  const ManyOperands& o;
  const uint32_t shared;
  const int32_t* const before;
  const int team, group, warp, lane;  // the group and the warp of the team
  StraightTurn<S::kStages> turn;
  float total[S::kParts][kSums];
  // Scales of the tile's columns.  Those of blocks: a lane has every 32nd block's, and the one 32 blocks further on.  Others: it has
  // every 32nd column's.
  float of_columns[(S::kColumns + 31) / 32];
  float row_factors[2];  // of its rows, if not of blocks
  uint32_t written;      // in groups: a bit for each of the warp's rows
  uint32_t skipped;      // bytes of scales of rows before the tile's

  // A block of k that has been given to the matrix units.
  struct Pending {
    uint32_t stage;
    float scale[2];  // of the lane's two rows
  };

  __device__ float load_of_columns(const ManyTile& t, int first) const {
    const MmScales& s = o.p.args.b_scales;
    const int block = first + lane;
    if (block >= o.blocks) return 0.0f;
    return __ldg(static_cast<const float*>(s.data) + (S::kGrouped ? t.group * s.group : 0) +
                 t.column / ScaledMmArgs::kBlock * s.along + block * s.block);
  }

  template <int kPart>
  __device__ void begin(float (&sum)[kSums], Pending& pending) {
    const uint32_t stage = turn.stage;
    if constexpr (kPart == 0) wait_for(shared + S::kFullAt + stage * 8, turn.parity);
    float of_rows[2] = {1.0f, 1.0f}, of_column = 1.0f;
    if (in_blocks<S>(o)) {
      const uint32_t scales = shared + S::kScalesAt + stage * S::kScales * 4;
      const uint32_t mine = scales + (kPart * S::kGroups * 64 + warp * 16 + lane / 4) * 4 + skipped;
      if constexpr (S::kStrided) of_column = load_shared_float(scales + S::kRows * 4);
      of_rows[0] = load_shared_float(mine);
      of_rows[1] = load_shared_float(mine + 32);
    }
    const uint64_t a =
        wgmma_matrix(shared + stage * S::kRowBytes + (kPart * S::kGroups + group) * 64 * kLine, 8 * kLine);
    const uint64_t b = wgmma_matrix(shared + S::kColumnsAt + stage * S::kColumnBytes, 8 * kLine);
    wgmma_pin(sum);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma8<float, S::kColumns>::ss(sum, wgmma_further(a, 32 * step), wgmma_further(b, 32 * step), step > 0);
    wgmma_commit();
    pending.stage = stage;
    pending.scale[0] = of_rows[0] * of_column;
    pending.scale[1] = of_rows[1] * of_column;
  }

  // kPart is the last that needs the stage unless it is the first of two.
  template <int kPart, int kLater>
  __device__ void end(float (&sum)[kSums], Pending& pending, const ManyTile& t, int block) {
    constexpr bool kLast = kPart == S::kParts - 1;
    if constexpr (!S::kStrided) {
      if (in_blocks<S>(o)) {
        const float of_column = __shfl_sync(~0u, of_columns[0], block % 32);
        pending.scale[0] *= of_column;
        pending.scale[1] *= of_column;
        if (kLast && (block + 1) % 32 == 0) {
          of_columns[0] = of_columns[1];
          of_columns[1] = load_of_columns(t, block + 33);
        }
      }
    }
    wgmma_pin(sum);
    wgmma_wait<kLater>();
    wgmma_pin(sum);
    if constexpr (kLast) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared + S::kEmptyAt + pending.stage * 8);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[kPart][i] = fmaf(pending.scale[i / 2 % 2], sum[i], total[kPart][i]);
  }

  __device__ void multiply_plain(const ManyTile& t) {
    float sum[kSums];
#pragma unroll 2
    for (int block = 0; block < o.blocks; ++block) {
      Pending pending;
      begin<0>(sum, pending);
      if constexpr (S::kParts > 1) {
        end<0, 0>(sum, pending, t, block);
        begin<S::kParts - 1>(sum, pending);
      }
      turn.next();
      end<S::kParts - 1, 0>(sum, pending, t, block);
    }
  }

  __device__ void multiply_rolling(const ManyTile& t) {
    float sum[2][kSums];
    Pending even, odd;
    begin<0>(sum[0], even);
    turn.next();
    int block = 1;
#pragma unroll 2
    for (; block + 1 < o.blocks; block += 2) {
      begin<0>(sum[1], odd);
      turn.next();
      end<0, 1>(sum[0], even, t, block - 1);
      begin<0>(sum[0], even);
      turn.next();
      end<0, 1>(sum[1], odd, t, block);
    }
    if (block < o.blocks) {
      begin<0>(sum[1], odd);
      turn.next();
      end<0, 1>(sum[0], even, t, block - 1);
      end<0, 0>(sum[1], odd, t, block);
    } else {
      end<0, 0>(sum[0], even, t, block - 1);
    }
  }

  // Scales that are not those of blocks: asked for before products are summed, or, where registers are scarce, brought near.
  __device__ const float* row_factor(const ManyTile& t, int line) const {
    const MmScales& a = o.p.args.a_scales;
    return static_cast<const float*>(a.data) + (S::kGrouped ? t.group * a.group : 0) +
           int64_t{min(t.row + warp * 16 + line, t.end_row - 1)} * a.along;
  }
  __device__ const float* column_factor(const ManyTile& t, int column) const {
    const MmScales& b = o.p.args.b_scales;
    return static_cast<const float*>(b.data) + (S::kGrouped ? t.group * b.group : 0) +
           int64_t{min(t.column + column, o.n - 1)} * b.along;
  }
  __device__ void load_factors(const ManyTile& t, int part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) row_factors[i] = __ldg(row_factor(t, part * S::kGroups * 64 + 8 * i + lane / 4));
    if (part > 0) return;
#pragma unroll
    for (int i = 0; i < (S::kColumns + 31) / 32; ++i) of_columns[i] = __ldg(column_factor(t, 32 * i + lane));
  }
  __device__ void prefetch_factors(const ManyTile& t) const {
    prefetch(row_factor(t, lane / 16 * S::kGroups * 64 + lane % 16));
    prefetch(column_factor(t, lane * 4));
  }
  __device__ void scale_all(const ManyTile& t) {
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      if constexpr (S::kParts > 1) load_factors(t, part);
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float of_column = __shfl_sync(~0u, of_columns[j / 4], j % 4 * 8 + lane % 4 * 2 + e);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = total[part][4 * j + 2 * i + e];
            x = row_factors[i] * (of_column * x);
          }
        }
    }
  }

  // Which of the warp's rows are to be written: lane l has row l % 16 of part l / 16.
  __device__ void find_written(const ManyTile& t) {
    const int part = lane / 16, row = t.row + part * S::kGroups * 64 + warp * 16 + lane % 16;
    written = __ballot_sync(~0u, part < S::kParts && o.p.has_row({t.row, t.end_row, t.column, t.group}, row));
  }

  // A warp's 16 rows, by way of shared memory.
  template <class T>
  __device__ void store(const ManyTile& t) const {
    const uint32_t staging = shared + S::kStagingAt + warp * S::kWarpBytes;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const int row = t.row + part * S::kGroups * 64 + warp * 16;
      if (!S::kGrouped && row >= t.end_row) continue;
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) {
        const int column = t.column + piece * S::kPiece;
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int eight = 0; eight < S::kPiece / 8 && piece * S::kPiece + eight * 8 < S::kColumns; eight += 2) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = (piece * S::kPiece / 8 + eight + i / 2) * 4 + i % 2 * 2;
            const auto pair = round_to<T>(Vec<float, 2>{total[part][at], total[part][at + 1]});
            x[i] = *reinterpret_cast<const uint32_t*>(&pair);
          }
          const int line = lane % 16, mine = eight + lane / 16;
          stmatrix_x4(staging + mine / 8 * 16 * kLine + chunk_at(line, mine % 8), x);
        }
        if (S::kGrouped && (written >> part * 16 & 0xffff) != 0xffff) {
          __syncwarp();
          store_lines<T>(t, row, column, written >> part * 16, staging);
        } else {
          fence_async_proxy();
          __syncwarp();
          const bool is_last = S::kLastBox < 64 && piece == S::kPieces - 1;
          if (lane == 0)
            store_boxes(is_last ? o.out_last : o.out, row + (S::kGrouped ? t.group * o.out_each : 0), column, staging);
        }
        __syncwarp();
      }
    }
  }

  // By the copy engine, which leaves out what is outside.
  __device__ static void store_boxes(const CUtensorMap& out, int row, int column, uint32_t staging) {
#pragma unroll
    for (int box = 0; box < S::kPiece / 64; ++box)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                       reinterpret_cast<uint64_t>(&out)),
                   "r"((column + box * 64) * 2), "r"(row), "r"(staging + box * 16 * kLine)
                   : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // By lanes, eight columns at a time: of 16 rows those that `some` has a bit for.
  template <class T>
  __device__ void store_lines(const ManyTile& t, int row, int column, uint32_t some, uint32_t staging) const {
    constexpr int kEights = S::kPiece / 8;
    const ScaledMmArgs& args = o.p.args;
    T* const out = static_cast<T*>(args.out) + t.group * args.out_group + row * args.out_stride + column;
#pragma unroll 1
    for (int i = lane; i < 16 * kEights; i += 32) {
      const int line = i / kEights, eight = i % kEights, there = o.n - column - eight * 8;
      if ((some >> line & 1) == 0 || there <= 0) continue;
      const uint4 x = load_shared_16(staging + eight / 8 * 16 * kLine + chunk_at(line, eight % 8));
      T* const to = out + line * args.out_stride + eight * 8;
      if (there >= 8) {
        *reinterpret_cast<uint4*>(to) = x;
      } else {
#pragma unroll 1
        for (int e = 0; e < there; ++e) to[e] = reinterpret_cast<const T*>(&x)[e];
      }
    }
  }

  __device__ void run() {
    for_tiles<S, true>(o, before, team, [&](const ManyTile& t) {
      if constexpr (S::kGrouped) {
        turn = {static_cast<uint32_t>(of_warp<true>(turn.stage)), static_cast<uint32_t>(of_warp<true>(turn.parity))};
        find_written(t);
      }
      skipped = S::kGrouped ? t.row % 4 * 4 : 0;
      if (!in_blocks<S>(o)) {
        if constexpr (S::kParts == 1) load_factors(t, 0);
        if constexpr (S::kParts > 1) prefetch_factors(t);
      } else if constexpr (!S::kStrided) {
        of_columns[0] = load_of_columns(t, 0);
        of_columns[1] = load_of_columns(t, 32);
      }
#pragma unroll
      for (int part = 0; part < S::kParts; ++part)
#pragma unroll
        for (float& x : total[part]) x = 0.0f;
      if (S::kParts > 1 || (S::kGroups > 1 && in_blocks<S>(o))) {
        multiply_plain(t);
      } else {
        multiply_rolling(t);
      }
      if (!in_blocks<S>(o)) scale_all(t);
      if (o.is_bfloat16) {
        store<bf16>(t);
      } else {
        store<half>(t);
      }
    });
    // Shared memory has to stay until it has been read.
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) scaled_mm_many_sm90_kernel(const __grid_constant__ ManyOperands o) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kStages * S::kTeams; ++i) {
      const uint32_t at = shared + i / S::kStages * S::kTeamBytes + i % S::kStages * 8;
      mbarrier_init(at + S::kFullAt, S::kStrided ? 1 + 32 : 1);
      mbarrier_init(at + S::kEmptyAt, 4 * S::kGroups);
    }
    fence_async_proxy();
    prefetch_map(o.rows);
    prefetch_map(o.columns);
    prefetch_map(o.out);
  }
  __syncthreads();
  begin_dependent();
  auto* const before = reinterpret_cast<int32_t*>(memory + S::kBytes);
  if (S::kGrouped && o.p.counts_tiles()) count_tiles(o.p.args.groups, o.m, S::kRows, o.p.report_begins, before);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp >= S::kWarps) {
    if constexpr (S::kWarps > 4) give_registers<40>();
    const int mine = warp - S::kWarps;
    if (mine < S::kTeams && lane == 0) fill<S>(o, shared + mine * S::kTeamBytes, before, mine);
    if (S::kStrided && mine > 0) fill_scales<S>(o, shared, mine - 1);
  } else {
    if constexpr (S::kWarps > 4) take_registers<232>();
    constexpr int kOfTeam = 4 * S::kGroups;
    const int team = S::kTeams > 1 ? warp / kOfTeam : 0, of_team = S::kTeams > 1 ? warp % kOfTeam : warp;
    ManyMultiplier<S> multiplier{
        o, shared + team * S::kTeamBytes, before, team, S::kGroups > 1 ? of_team / 4 : 0, of_team, lane, {}};
    multiplier.run();
  }
#endif
}

// Lines of all matrices as one, if they lie `each` lines apart: maps of two dimensions are faster than those of three.
bool join_lines(int64_t count, int64_t group, int64_t stride, int64_t lines, int& each, int64_t& all) {
  each = 0;
  all = lines;
  if (count <= 1) return true;
  if (stride <= 0 || group < 0 || group % stride != 0 || group / stride > INT32_MAX / count) return false;
  each = static_cast<int>(group / stride);
  all = (count - 1) * (group / stride) + lines;
  return all <= INT32_MAX;
}

// Scales of rows as floats side by side, of which a column of a tile is in a box; what is outside is zero.  A box that does not begin
// at a multiple of 16 bytes is an illegal instruction.
bool map_row_scales(ManyOperands& o, const ScaledMmArgs& args, int rows, int64_t matrices) {
  const MmScales& s = args.a_scales;
  const auto encode = tensor_map_encoder();
  const int64_t alone = matrices > 1 ? s.group : (args.m + 3) / 4 * 4, stride = args.blocks() > 1 ? s.block : alone;
  int64_t lines;
  if (!encode || s.along != 1 || stride % 4 != 0 || !is_aligned(16, s.data, {})) return false;
  if (!join_lines(matrices, s.group, stride, args.blocks(), o.scales_each, lines)) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(args.m), static_cast<cuuint64_t>(lines)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 4};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(rows), 1}, ones[2] = {1, 1};
  return encode(&o.row_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<void*>(s.data), sizes, strides, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Of 16 rows of out the last columns of a tile, whose lines in shared memory are as long as those of others.
bool map_last_columns(CUtensorMap& map, void* out, int columns, int64_t n, int64_t lines, int64_t stride) {
  const auto encode = tensor_map_encoder();
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(2 * n), static_cast<cuuint64_t>(lines)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(2 * columns), 16}, ones[2] = {1, 1};
  return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, out, sizes, strides, box, ones,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class S>
bool launch_shape(const ScaledMmArgs& args, const Launch& launch) {
  ManyOperands o{{}, {}, {}, {}, Problem(args, launch, S::kRows, S::kColumns), 0, 0, 0, false, false, 0, 0, 0,
                 0,  0,  0,  {}};
  const int64_t count = S::kGrouped ? args.groups.count : 1, matrices = args.groups.are_apart() ? count : 1;
  const int64_t tiles = int64_t{o.p.row_tiles} * o.p.column_tiles;
  o.m = static_cast<int>(args.m);
  o.n = static_cast<int>(args.n);
  o.blocks = static_cast<int>(args.blocks());
  o.in_blocks = args.in_blocks;
  o.is_bfloat16 = args.out_dtype == DType::kBFloat16;
  // Boxes with lines outside of the array take longer than whole ones, so rows are shared out evenly among tiles, in steps of the 16
  // that a warp writes.  Of groups of few rows those of others would come as well.
  const int64_t each = (args.m + o.p.row_tiles - 1) / o.p.row_tiles;
  o.lines = static_cast<int>(!S::kGrouped        ? (each + 15) / 16 * 16
                             : args.m < S::kRows ? (args.m + 7) / 8 * 8
                                                 : S::kRows);
  const int64_t of_group = args.groups.expected_rows / S::kRows;
  o.band = static_cast<uint32_t>(of_group < 2 ? 2 : of_group > 16 ? 16 : of_group);
  // The strides of what there is one of say nothing.
  const int64_t a_stride = args.m > 1 ? args.a_stride : (args.k + 15) / 16 * 16;
  const int64_t b_stride = args.n > 1 ? args.b_along_n : (args.k + 15) / 16 * 16;
  const int64_t out_stride = args.m > 1 ? args.out_stride : (args.n + 7) / 8 * 8;
  int64_t a_lines, b_lines, out_lines;
  if (!join_lines(matrices, args.a_group, a_stride, args.m, o.rows_each, a_lines) ||
      !join_lines(count, args.b_group, b_stride, args.n, o.columns_each, b_lines) ||
      !join_lines(matrices, args.out_group, out_stride, args.m, o.out_each, out_lines))
    return false;
  if (!make_tensor_map(o.rows, args.a, {args.k, a_lines}, {a_stride}, {o.lines}) ||
      !make_tensor_map(o.columns, args.b, {args.k, b_lines}, {b_stride}, {S::kColumns}) ||
      !make_tensor_map(o.out, args.out, {2 * args.n, out_lines}, {2 * out_stride}, {16}) ||
      (S::kLastBox < 64 && !map_last_columns(o.out_last, args.out, S::kLastBox, args.n, out_lines, 2 * out_stride)))
    return false;
  if (!S::kStrided && args.in_blocks && !map_row_scales(o, args, S::kScaleBox, matrices)) return false;
  const auto most = static_cast<int64_t>(num_sms(launch.device));
  launch_dependent_shared(scaled_mm_many_sm90_kernel<S>, dim3(static_cast<unsigned>(tiles < most ? tiles : most)),
                          dim3(S::kThreads), S::kBytes + (S::kGrouped ? (count + 1) * 4 : 0), launch, "scaled_mm", o);
  return true;
}

}  // namespace

bool launch_many_sm90(const ScaledMmArgs& args, const Launch& launch) {
  const RowGroups& groups = args.groups;
  if (args.is_int8 || args.bias || args.n < 8 || args.n > INT32_MAX / 4) return false;
  if (args.a_scales.is_e8m0 || args.b_scales.is_e8m0 || args.out_dtype == DType::kFloat32) return false;
  if (!is_aligned(16, args.out, {2 * args.out_stride, 2 * args.out_group})) return false;
  // Rounds of tiles.  Small ones are slower for each row.
  const int64_t sms = num_sms(launch.device);
  const auto rounds = [&](int64_t rows, int64_t at_once, int64_t columns = 128) {
    const int64_t row_tiles =
        groups.are_apart() ? groups.count * ((groups.expected_rows + rows - 1) / rows) : (args.m + rows - 1) / rows;
    return (row_tiles * ((args.n + columns - 1) / columns) + at_once - 1) / at_once;
  };
  if (groups.count > 0) {
    if (groups.expected_rows <= 64 || 4 * rounds(64, 2 * sms) < 5 * rounds(128, 2 * sms))
      return launch_shape<ManyShape<1, 1, 4, 2, Scales::kGroups>>(args, launch);
    return launch_shape<ManyShape<1, 2, 3, 2, Scales::kGroups>>(args, launch);
  }
  if (args.m <= 64) return false;
  const bool is_low = 5 * rounds(64, sms) < 8 * rounds(128, sms);
  if (args.in_blocks) {
    if (is_low) return launch_shape<ManyShape<1, 1, 8, 1, Scales::kStridedBlocks>>(args, launch);
    // Tiles of 256 rows read least; they pay if k is long.
    if (args.k >= 4096 && 40 * rounds(256, sms) <= 21 * rounds(128, sms))
      return launch_shape<ManyShape<2, 2, 4, 2, Scales::kBlocks>>(args, launch);
    return launch_shape<ManyShape<2, 1, 5, 1, Scales::kBlocks>>(args, launch);
  }
  if (is_low) return launch_shape<ManyShape<1, 1, 8, 1, Scales::kLines>>(args, launch);
  // Few rounds, the last of which would leave many idle.
  if (35 * rounds(128, sms, 112) <= 36 * rounds(128, sms))
    return launch_shape<ManyShape<2, 1, 7, 2, Scales::kLines, 112>>(args, launch);
  return launch_shape<ManyShape<2, 1, 5, 1, Scales::kLines>>(args, launch);
}

}  // namespace scaled_mm
}  // namespace pykv
