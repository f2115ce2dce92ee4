// What the kernels of scaled_mm share: tiles of 128 bytes of k in shared memory, scales, and what becomes of sums.
#pragma once

#include "cuda/cp_async.cuh"
#include "cuda/mma.cuh"
#include "cuda/types.cuh"
#include "cuda/vec.cuh"
#include "gemm/row_groups.cuh"
#include "gemm/scaled_mm.h"

namespace pykv::scaled_mm {

inline constexpr int kLine = ScaledMmArgs::kBlock;  // bytes of a row of a tile

// Chunk c of 16 bytes of line i lies at place c XOR i % 8: what ldmatrix and wgmma (cuda/wgmma.cuh) read without conflicts.
__device__ inline uint32_t chunk_at(int line, int chunk) { return line * kLine + ((chunk ^ line % 8) << 4); }

__device__ inline float scale_at(const MmScales& s, int64_t along, int64_t block) {
  const int64_t at = s.place(along, block);
  if (!s.is_e8m0) return __ldg(static_cast<const float*>(s.data) + at);
  const uint32_t byte = __ldg(static_cast<const uint8_t*>(s.data) + at);
  return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// Lines of one operand: rows of a or columns of b.
struct Lines {
  const uint8_t* data;
  int64_t count, stride, along_k;
  bool in_chunks;  // lines begin at multiples of 16 bytes, and their elements lie side by side

  Lines(const uint8_t* from, int64_t lines, int64_t step, int64_t k_step)
      : data(from),
        count(lines),
        stride(step),
        along_k(k_step),
        // One line alone counts as one of many that lie without gaps: otherwise it might have other bits than among them.
        in_chunks((k_step == 1) && is_aligned(16, from, {step})) {}

  // How many of 16 elements there are.
  __device__ int valid(int64_t line, int64_t column, int64_t k) const {
    const int64_t left = line < count ? k - column : 0;
    return left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
  }

  // Copies 16 elements of a line of a group's matrix, which begins `group` elements further on, to shared memory, zeros where
  // there are none: asynchronously, if in_chunks.
  __device__ void copy(uint32_t to, int64_t group, int64_t line, int64_t column, int64_t k) const {
    const int bytes = valid(line, column, k);
    const uint8_t* const from = bytes > 0 ? data + group + line * stride + column : data;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }

  // Or one by one.
  __device__ void gather(uint32_t to, int64_t group, int64_t line, int64_t column, int64_t k) const {
    const int bytes = valid(line, column, k);
    const uint8_t* const from = data + group + line * stride + column * along_k;
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < bytes) words[i / 4] |= static_cast<uint32_t>(__ldg(from + i * along_k)) << i % 4 * 8;
    store_shared(to, make_uint4(words[0], words[1], words[2], words[3]));
  }
};

// One tile of lines after another, in shared memory; the thread copies its share of all.
template <int kFirst, int kSecond, int kThreads>
__device__ void copy_lines(const Lines& first, const Lines& second, int64_t first_group, int64_t second_group,
                           int64_t first_line, int64_t second_line, uint32_t to, int64_t column, int64_t k,
                           int thread) {
  constexpr int kEach = (kFirst + kSecond) * 8 / kThreads;
  if (first.in_chunks && second.in_chunks) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int line = (i * kThreads + thread) / 8, chunk = thread % 8;
      const bool is_first = line < kFirst;
      const Lines& lines = is_first ? first : second;
      lines.copy(to + chunk_at(line, chunk), is_first ? first_group : second_group,
                 is_first ? first_line + line : second_line + line - kFirst, column + chunk * 16, k);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kEach; ++i) {
    const int line = (i * kThreads + thread) / 8, chunk = thread % 8;
    const bool is_first = line < kFirst;
    const Lines& lines = is_first ? first : second;
    lines.gather(to + chunk_at(line, chunk), is_first ? first_group : second_group,
                 is_first ? first_line + line : second_line + line - kFirst, column + chunk * 16, k);
  }
}

// Rows [first_row, end_row) of out, from first_column on, with the weight of a group.
struct Tile {
  int64_t first_row, end_row, first_column;
  int group;
};

struct Problem {
  ScaledMmArgs args;
  Lines rows, columns;  // of a; of b
  int tile_rows;
  uint32_t row_tiles, column_tiles;  // where sizes of groups are on the device: at most so many
  bool wide_out;                     // four neighbours of out can be written at once
  Reporter report_rows, report_begins;

  Problem(const ScaledMmArgs& a, const Launch& launch, int tile_rows, int tile_columns)
      : args(a),
        rows(a.a, a.m, a.a_stride, a.a_along_k),
        columns(a.b, a.n, a.b_along_n, a.b_along_k),
        tile_rows(tile_rows),
        report_rows(launch.reporter(a.groups.report_rows)),
        report_begins(launch.reporter(a.groups.report_begins)) {
    const auto size = static_cast<int64_t>(size_of(a.out_dtype));
    wide_out = is_aligned(4 * size, a.out, {a.out_stride * size, a.out_group * size});
    int64_t of_rows = (a.m + tile_rows - 1) / tile_rows;
    if (a.groups.are_apart()) of_rows *= a.groups.count;
    if (a.groups.begins.data) of_rows += a.groups.count;
    const int64_t of_columns = (a.n + tile_columns - 1) / tile_columns;
    if (of_rows > INT32_MAX / of_columns)
      fail(PYKV_VALUE_ERROR, "out: has too many elements: %lld rows of %lld", static_cast<long long>(a.m),
           static_cast<long long>(a.n));
    row_tiles = static_cast<uint32_t>(of_rows);
    column_tiles = static_cast<uint32_t>(of_columns);
  }

  // Whether count_tiles() tells where the tiles of groups are.
  __device__ bool counts_tiles() const { return args.groups.count > 0 && !args.groups.of_rows.data; }
  __device__ uint32_t tiles(const int32_t* before) const {
    return (counts_tiles() ? static_cast<uint32_t>(before[args.groups.count]) : row_tiles) * column_tiles;
  }

  // Tiles that are worked on at the same time share lines in the L2: those of 16 tiles of rows, column by column.  False: there is
  // nothing to do.
  __device__ bool tile_of(uint32_t index, const int32_t* before, Tile& tile, uint32_t& column_tile) const {
    constexpr uint32_t kBand = 16;
    const uint32_t all = counts_tiles() ? static_cast<uint32_t>(before[args.groups.count]) : row_tiles;
    const uint32_t band = index / (kBand * column_tiles), within = index - band * kBand * column_tiles;
    const uint32_t height = min(kBand, all - band * kBand);
    column_tile = within / height;
    const int64_t row_tile = band * kBand + within % height;
    tile = {row_tile * tile_rows, min((row_tile + 1) * tile_rows, args.m), 0, 0};
    const RowGroups& groups = args.groups;
    if (groups.count == 0) return true;
    if (groups.of_rows.data) {
      const int64_t group = groups.of_rows[tile.first_row / RowGroups::kNeighbours * RowGroups::kNeighbours];
      tile.group = static_cast<int>(group);
      if (group >= groups.count && column_tile == 0) report_rows(group, groups.count);
      return group >= 0 && group < groups.count;
    }
    tile.group = group_of_tile(before, static_cast<int>(groups.count), static_cast<int32_t>(row_tile));
    int64_t begin;
    groups.rows_of(tile.group, args.m, begin, tile.end_row, [](int64_t, int64_t) {});
    tile.first_row = begin + (row_tile - before[tile.group]) * tile_rows;
    return true;
  }

  // Whether a row of a tile is to be written.
  __device__ bool has_row(const Tile& tile, int64_t row) const {
    if (row >= tile.end_row) return false;
    if (!args.groups.of_rows.data) return true;
    return args.groups.group_of(row, [&](int64_t value, int64_t bound) {
      if (tile.first_column == 0) report_rows(value, bound);
    }) == tile.group;
  }
};

// Writes a tile of out from its sums in shared memory, [kRows][kPitch]: integers where they are exact, else floats, which
// are scaled already if scales are those of blocks.
template <class T, int kRows, int kColumns, int kPitch, int kThreads>
__device__ void store_tile_as(const Problem& p, const uint32_t* sums, const Tile& tile, int thread) {
  constexpr int kEach = 4;
  const ScaledMmArgs& args = p.args;
  const MmScales a_scales = args.a_scales.from(tile.group * args.a_scales.group),
                 b_scales = args.b_scales.from(tile.group * args.b_scales.group);
  const auto* const bias = args.bias ? static_cast<const T*>(args.bias) + tile.group * args.bias_group : nullptr;
#pragma unroll 1
  for (int i = thread; i < kRows * kColumns / kEach; i += kThreads) {
    const int r = i / (kColumns / kEach), c = i % (kColumns / kEach) * kEach;
    const int64_t row = tile.first_row + r, column = tile.first_column + c;
    if (column >= args.n || !p.has_row(tile, row)) continue;
    const uint4 raw = *reinterpret_cast<const uint4*>(sums + r * kPitch + c);
    const uint32_t words[kEach] = {raw.x, raw.y, raw.z, raw.w};
    const float a_scale = args.in_blocks ? 1.0f : scale_at(a_scales, row, 0);
    const int64_t azp = args.azp ? __ldg(args.azp + row * args.azp_stride) : 1;
    Vec<float, kEach> x;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t at = min(column + e, args.n - 1);
      x[e] = __uint_as_float(words[e]);
      if (args.is_int8 && !args.in_blocks) {
        const auto sum = static_cast<int32_t>(words[e]);
        x[e] = args.azp_adj ? __ll2float_rn(sum - azp * __ldg(args.azp_adj + at * args.azp_adj_stride))
                            : __int2float_rn(sum);
      }
      if (!args.in_blocks) x[e] = a_scale * (scale_at(b_scales, at, 0) * x[e]);
      if (bias) x[e] += to_float(bias[at]);
    }
    T* const out = static_cast<T*>(args.out) + tile.group * args.out_group + row * args.out_stride + column;
    if (p.wide_out && column + kEach <= args.n) {
      *reinterpret_cast<Vec<T, kEach>*>(out) = round_to<T>(x);
    } else {
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (column + e < args.n) out[e] = from_float<T>(x[e]);
    }
  }
}

template <int kRows, int kColumns, int kPitch, int kThreads>
__device__ void store_tile(const Problem& p, const uint32_t* sums, const Tile& tile, int thread) {
  if (p.args.out_dtype == DType::kBFloat16)
    store_tile_as<bf16, kRows, kColumns, kPitch, kThreads>(p, sums, tile, thread);
  else if (p.args.out_dtype == DType::kFloat16)
    store_tile_as<half, kRows, kColumns, kPitch, kThreads>(p, sums, tile, thread);
  else
    store_tile_as<float, kRows, kColumns, kPitch, kThreads>(p, sums, tile, thread);
}

// By Hopper's matrix units (scaled_mm_sm90.cu).  False if the GPU has none, or they cannot copy these arrays, whatever m is.
bool launch_sm90(const ScaledMmArgs& args, const Launch& launch);
// What is usual, of many rows (scaled_mm_many_sm90.cu).  False if it is not that.
bool launch_many_sm90(const ScaledMmArgs& args, const Launch& launch);

}  // namespace pykv::scaled_mm
