// out = a b on Hopper's asynchronous matrix units (sm_90a), where rows of a and columns of b begin at multiples of 16 bytes.
//
// The first warpgroup of a block fills a ring of stages, 128 bytes of k each: one thread asks the copy engine for tiles of a and
// of b, the other warps bring the scales of blocks.  One or two warpgroups multiply, 64 rows of a at a time.  Tiles of out
// follow one another: the ring is filled for the next while the last is written.
//
// Few rows: bound by reading b, once.  Tiles have so many columns that every multiprocessor has as much of b to read, and
// several blocks of k are multiplied at once, so that the ring empties as fast as it fills.
// Many rows: bound by the matrix units, and by the warps, to whom adding sums of 8-bit products in fp32 is as much work.  The
// matrix units have a block of k to sum while the one before is added.  What is usual has a kernel of its own
// (scaled_mm_many_sm90.cu).
//
// The same instruction serves any number of rows: what is added when does not depend on the tile.
#pragma once

#include "cuda/dependent_shared.cuh"
#include "gemm/scaled_multiplier_sm90.cuh"

namespace pykv::scaled_mm {
namespace {

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
    if (warp < S::kCopiers && threadIdx.x % 32 == 0) fill<S>(o, ring, warp);
    if (warp >= S::kCopiers && o.p.args.in_blocks) fill_scales<S>(o, ring, warp - S::kCopiers);
  } else {
    if constexpr (S::kMovesRegisters) take_registers<S::kMany>();
    const int group = warpgroup - 1, warp = group * 4 + threadIdx.x / 32 % 4;
    Multiplier<S> multiplier{{o, ring, staging + warp * S::kWarpBytes, tiles[warp], group}};
    multiplier.run();
  }
#endif
}

// Tiles of `columns_each` columns, at most kColumns, multiples of 8.
template <class S>
bool launch_shape(const ScaledMmArgs& args, const Launch& launch, int columns_each = S::kColumns) {
  const RowGroups& groups = args.groups;
  const auto count = static_cast<int64_t>(groups.count > 0 ? groups.count : 1);
  Operands o{{}, {}, Problem(args, launch, S::kRows, columns_each), 0, 0, 0, 0, false, 0, 0};
  o.columns_each = static_cast<uint32_t>(columns_each);
  const auto size = static_cast<int64_t>(size_of(args.out_dtype));
  o.p.wide_out = is_aligned(16, args.out, {args.out_stride * size, args.out_group * size});
  // Boxes with lines outside of the array take longer than whole ones, so rows that are in no groups are shared out evenly among tiles.
  const int64_t each = groups.count > 0 ? args.m : (args.m + o.p.row_tiles - 1) / o.p.row_tiles;
  const int lines = static_cast<int>(each < S::kRows ? (each + 7) / 8 * 8 : S::kRows);
  if (groups.count == 0) o.p.tile_rows = lines;
  o.lines = static_cast<uint32_t>(lines);
  o.stage_bytes = static_cast<uint32_t>((lines + columns_each) * kLine);
  o.stages = static_cast<uint32_t>(S::stages(static_cast<int>(o.stage_bytes)));
  const auto stride = [&](int64_t given, int64_t lines_) { return lines_ > 1 ? given : (args.k + 15) / 16 * 16; };
  const int64_t a_stride = stride(args.a_stride, args.m), b_stride = stride(args.b_along_n, args.n);
  const int64_t matrices = groups.are_apart() ? count : 1;
  // Maps of two dimensions are faster than those of three.
  const auto join = [&](int64_t group, int64_t step, int64_t lines_, int64_t of, int& each) {
    if (of > 1 && (step <= 0 || group < 0 || group % step != 0 || group / step > INT32_MAX / of)) return int64_t{0};
    each = of > 1 ? static_cast<int>(group / step) : 0;
    return (of - 1) * each + lines_;
  };
  const int64_t a_lines = join(args.a_group, a_stride, args.m, matrices, o.rows_step);
  const int64_t b_lines = join(args.b_group, b_stride, args.n, count, o.columns_step);
  o.are_joined = a_lines > 0 && b_lines > 0 && a_lines <= INT32_MAX && b_lines <= INT32_MAX;
  const auto group_stride = [&](int64_t given, int64_t of) { return of > 1 ? given : 16; };
  const bool are_mapped = o.are_joined
                              ? make_tensor_map(o.rows, args.a, {args.k, a_lines}, {a_stride}, {lines}) &&
                                    make_tensor_map(o.columns, args.b, {args.k, b_lines}, {b_stride}, {columns_each})
                              : make_tensor_map(o.rows, args.a, {args.k, args.m, matrices},
                                                {a_stride, group_stride(args.a_group, matrices)}, {lines, 1}) &&
                                    make_tensor_map(o.columns, args.b, {args.k, args.n, count},
                                                    {b_stride, group_stride(args.b_group, count)}, {columns_each, 1});
  if (!are_mapped) return false;
  const auto most = static_cast<uint32_t>(num_sms(launch.device) * S::kPerSm);
  const uint32_t tiles = o.p.row_tiles * o.p.column_tiles;
  const size_t shared_bytes = S::kSharedBytes + (groups.count > 0 ? (count + 1) * 4 : 0);
  launch_dependent_shared(scaled_mm_sm90_kernel<S>, dim3(tiles < most ? tiles : most), dim3(S::kThreads), shared_bytes,
                          launch, "scaled_mm", o);
  return true;
}

}  // namespace
}  // namespace pykv::scaled_mm
