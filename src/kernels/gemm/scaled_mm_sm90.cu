// out = a b on Hopper's asynchronous matrix units (sm_90a), where rows of a and columns of b begin at multiples of 16 bytes.
//
// One thread of a block fills a ring of tiles of 128 bytes of k; one or two warpgroups multiply them, 64 rows of a at a time.
// Tiles of out follow one another: the ring is filled for the next while the last is written.
//
// Few rows: bound by reading b, once.  Blocks are so many that all multiprocessors read, and rows that do not exist are not read.
// Many rows: bound by the matrix units.  Sums of 128 of k are added in fp32 by one warpgroup while the other multiplies.
// Between them, by the L2: the blocks of a cluster have the same rows of a, and each reads a part of these for all.
//
// The same instruction serves any number of rows: what is added when does not depend on the tile.
#include "cuda/cluster.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma8.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv {
namespace scaled_mm {

// kGroups warpgroups, each of kHalves times 64 rows.  kExact: sums of int8 that stay integers.
template <class Sum_, bool kExact_, int kGroups_, int kHalves_, int kColumns_, int kStages_, int kCluster_ = 1,
          int kPerSm_ = 1>
struct WarpgroupShape {
  using Sum = Sum_;
  static constexpr bool kExact = kExact_;
  static constexpr int kGroups = kGroups_, kHalves = kHalves_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kCluster = kCluster_;  // blocks, beside each other along n
  static constexpr int kPerSm = kPerSm_;      // blocks of a multiprocessor
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64 * kGroups * kHalves;
  static constexpr int kRowBytes = kRows * kLine, kStageBytes = kRowBytes + kColumns * kLine;
  static constexpr int kPitch = kColumns + 8;        // of the sums of a row: lanes of half a warp meet all banks
  static constexpr int kSumBytes = 64 * kPitch * 4;  // of a warpgroup
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kSumBytes;
  static constexpr bool kMovesRegisters = kHalves > 1;
  static_assert(kSharedBytes * kPerSm + 1024 * kPerSm <= 228 << 10);
};

namespace {

struct Operands {
  CUtensorMap rows, columns;
  Problem p;
  uint32_t groups;       // of kCluster tiles
  uint32_t slice_lines;  // of a: what one block reads for its cluster
  uint32_t stage_bytes;  // that are copied to each block
};

struct Ring {
  uint32_t data, full, empty;  // addresses in shared memory
};

// Where the next stage lies, and the parity of the phase that its barriers are in.
template <int kStages>
struct Turn {
  int stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The first row and column of this block's tile of a group.
template <class S>
__device__ void tile_of(const Problem& p, uint32_t group, int64_t& first_row, int64_t& first_column) {
  uint32_t row_tile, column_group;
  p.tile_of(group, row_tile, column_group);
  first_row = int64_t{row_tile} * S::kRows;
  first_column = (int64_t{column_group} * S::kCluster + blockIdx.x % S::kCluster) * S::kColumns;
}

template <class S>
__device__ void fill(const Operands& o, const Ring& ring) {
  const int blocks = static_cast<int>(o.p.args.blocks());
  const uint32_t rank = blockIdx.x % S::kCluster;
  Turn<S::kStages> turn;
#pragma unroll 1
  for (uint32_t group = blockIdx.x / S::kCluster; group < o.groups; group += gridDim.x / S::kCluster) {
    int64_t first_row, first_column;
    tile_of<S>(o.p, group, first_row, first_column);
    const int line = static_cast<int>(first_row) + static_cast<int>(rank * o.slice_lines);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, turn.next()) {
      const uint32_t full = ring.full + turn.stage * 8, to = ring.data + turn.stage * S::kStageBytes;
      const uint32_t empty = ring.empty + turn.stage * 8;
      if constexpr (S::kCluster > 1) {
        cluster_await(empty, turn.parity ^ 1);
      } else {
        mbarrier_wait(empty, turn.parity ^ 1);
      }
      cluster_expect(full, o.stage_bytes);
      copy_rectangle(to + S::kRowBytes, o.columns, block * kLine, static_cast<int>(first_column), full);
      if constexpr (S::kCluster > 1) {
        copy_rectangle_to_all(to + rank * o.slice_lines * kLine, o.rows, block * kLine, line, full,
                              (1 << S::kCluster) - 1);
      } else {
        copy_rectangle(to, o.rows, block * kLine, line, full);
      }
    }
  }
}

template <class S>
struct Multiplier {
  using Sum = typename S::Sum;
  static constexpr int kEach = S::kColumns / 2;  // sums of a lane and 64 rows

  const Problem& p;
  const Ring& ring;
  uint32_t* const staging;
  const int group;  // known to be uniform
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;

  Sum sum[S::kExact ? S::kHalves : 1][kEach];
  float total[S::kExact ? 1 : S::kHalves][kEach];
  float scale[S::kHalves][2], next_scale[S::kHalves][2];

  __device__ int first_line(int half) const { return (group * S::kHalves + half) * 64; }

  __device__ void load_scales(int64_t first_row, int64_t first_column, int block) {
    if (!p.args.in_blocks) return;
    const float of_columns = scale_at(p.args.b_scales, min(first_column, p.args.n - 1) / ScaledMmArgs::kBlock, block);
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = first_row + first_line(h) + thread / 32 * 16 + 8 * i + lane / 4;
        next_scale[h][i] = of_columns * scale_at(p.args.a_scales, min(row, p.args.m - 1), block);
      }
  }

  __device__ void multiply(int half, int into, uint32_t stage, bool anew) {
    const uint64_t a = wgmma_matrix(stage + first_line(half) * kLine, 8 * kLine);
    const uint64_t b = wgmma_matrix(stage + S::kRowBytes, 8 * kLine);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma8<Sum, S::kColumns>::ss(sum[into], wgmma_further(a, 32 * step), wgmma_further(b, 32 * step),
                                   step > 0 || !anew);
  }

  __device__ void free(int stage) const {
    __syncwarp();
    if constexpr (S::kCluster > 1) {
      if (lane < S::kCluster) cluster_arrive(cluster_address(ring.empty + stage * 8, lane));
    } else {
      if (lane == 0) mbarrier_arrive(ring.empty + stage * 8);
    }
  }

  __device__ void run(uint32_t groups) {
    const int blocks = static_cast<int>(p.args.blocks());
    Turn<S::kStages> turn;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h) next_scale[h][0] = next_scale[h][1] = 1.0f;
#pragma unroll 1
    for (uint32_t tiles = blockIdx.x / S::kCluster; tiles < groups; tiles += gridDim.x / S::kCluster) {
      int64_t first_row, first_column;
      tile_of<S>(p, tiles, first_row, first_column);
#pragma unroll
      for (auto& part : sum)
#pragma unroll
        for (Sum& x : part) x = 0;
#pragma unroll
      for (auto& part : total)
#pragma unroll
        for (float& x : part) x = 0.0f;
      load_scales(first_row, first_column, 0);
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, turn.next()) {
        const uint32_t stage = ring.data + turn.stage * S::kStageBytes;
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
          for (int i = 0; i < 2; ++i) scale[h][i] = next_scale[h][i];
        load_scales(first_row, first_column, min(block + 1, blocks - 1));
        mbarrier_wait(ring.full + turn.stage * 8, turn.parity);
        if constexpr (S::kExact) {
          wgmma_begin();
#pragma unroll
          for (int h = 0; h < S::kHalves; ++h) multiply(h, h, stage, block == 0);
          wgmma_commit();
          wgmma_wait<0>();
#pragma unroll
          for (int h = 0; h < S::kHalves; ++h) wgmma_pin(sum[h]);
          free(turn.stage);
        } else {
#pragma unroll
          for (int h = 0; h < S::kHalves; ++h) {
            wgmma_pin(sum[0]);
            wgmma_begin();
            multiply(h, 0, stage, true);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(sum[0]);
            if (h == S::kHalves - 1) free(turn.stage);
#pragma unroll
            for (int i = 0; i < kEach; ++i)
              total[h][i] = fmaf(scale[h][i / 2 % 2], static_cast<float>(sum[0][i]), total[h][i]);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < S::kHalves; ++h) {
        named_barrier_sync(1 + group, 128);  // what lay there has been written
        put_sums(h);
        named_barrier_sync(1 + group, 128);
        store_tile<64, S::kColumns, S::kPitch, 128>(p, staging, first_row + first_line(h), first_column, thread);
      }
    }
  }

  __device__ void put_sums(int half) const {
    uint32_t* const to = staging + (thread / 32 * 16 + lane / 4) * S::kPitch + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      uint2 pair;
      if constexpr (S::kExact) {
        pair = {static_cast<uint32_t>(sum[half][i]), static_cast<uint32_t>(sum[half][i + 1])};
      } else {
        pair = {__float_as_uint(total[half][i]), __float_as_uint(total[half][i + 1])};
      }
      *reinterpret_cast<uint2*>(to + i / 2 % 2 * 8 * S::kPitch + i / 4 * 8) = pair;
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kPerSm) scaled_mm_sm90_kernel(const __grid_constant__ Operands o) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 unaligned[];
  __shared__ uint64_t barriers[2 * S::kStages];
  const uint32_t start = shared_address(unaligned), data = (start + 1023) / 1024 * 1024;
  const Ring ring{data, shared_address(barriers), shared_address(barriers + S::kStages)};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(ring.full + i * 8, 1);
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
    if constexpr (S::kMovesRegisters) give_registers<24>();
    if (threadIdx.x == 0) fill<S>(o, ring);
  } else {
    if constexpr (S::kMovesRegisters) take_registers<240>();
    const int group = warpgroup - 1;
    auto* const staging = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(unaligned) + (data - start) +
                                                      S::kStages * S::kStageBytes + group * S::kSumBytes);
    Multiplier<S> multiplier{o.p, ring, staging, group};
    multiplier.run(o.groups);
  }
  if constexpr (S::kCluster > 1) {  // nobody copies to this block any more, or arrives at its barriers
    __syncwarp();
    cluster_announce();
    cluster_wait();
  }
#endif
}

template <class S>
void launch_clusters(const Operands& o, uint32_t blocks, const Launch& launch) {
  const auto kernel = scaled_mm_sm90_kernel<S>;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes), "scaled_mm");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {S::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream_of(launch);
  config.attrs = attributes;
  config.numAttrs = 2;
  cuda_check(cudaLaunchKernelEx(&config, kernel, o), "scaled_mm");
}

template <class S>
bool launch_shape(const ScaledMmArgs& args, const Launch& launch) {
  constexpr int kCluster = S::kCluster;
  Operands o{{}, {}, Problem(args, S::kRows, S::kColumns), 0, 0, 0};
  o.p.column_tiles = (o.p.column_tiles + kCluster - 1) / kCluster;  // groups of them
  o.groups = o.p.row_tiles * o.p.column_tiles;
  constexpr int kLeast = 8 * kCluster;  // lines: each block's begin at a multiple of 1024 bytes
  const int lines = static_cast<int>(args.m < S::kRows ? (args.m + kLeast - 1) / kLeast * kLeast : S::kRows);
  o.slice_lines = static_cast<uint32_t>(lines / kCluster);
  o.stage_bytes = static_cast<uint32_t>((lines + S::kColumns) * kLine);
  const auto stride = [&](int64_t given, int64_t count) { return count > 1 ? given : (args.k + 15) / 16 * 16; };
  if (!make_tensor_map(o.rows, args.a, args.k, args.m, stride(args.a_stride, args.m), lines / kCluster) ||
      !make_tensor_map(o.columns, args.b, args.k, args.n, stride(args.b_along_n, args.n), S::kColumns))
    return false;
  // Clusters of four do not fill every group of multiprocessors.
  const auto most = static_cast<uint32_t>(num_sms(launch.device) * S::kPerSm / kCluster - (kCluster > 2 ? 1 : 0));
  const uint32_t blocks = (o.groups < most ? o.groups : most) * kCluster;
  if constexpr (kCluster > 1) {
    launch_clusters<S>(o, blocks, launch);
  } else {
    launch_dependent_shared(scaled_mm_sm90_kernel<S>, dim3(blocks), dim3(S::kThreads), S::kSharedBytes, launch,
                            "scaled_mm", o);
  }
  return true;
}

// Tiles of the shape for which the busiest multiprocessor has least to do, or for few rows so many that all read b.
template <class Sum, bool kExact>
bool launch_sum(const ScaledMmArgs& args, const Launch& launch) {
  const int64_t sms = num_sms(launch.device);
  const auto tiles = [&](int rows, int columns) {
    return (args.m + rows - 1) / rows * ((args.n + columns - 1) / columns);
  };
  if (args.m <= 64) {
    const bool wide = tiles(64, 64) * 10 >= sms * 9;
    if (args.m <= 16) {
      if (wide) return launch_shape<WarpgroupShape<Sum, kExact, 1, 1, 64, 5, 1, 2>>(args, launch);
      return launch_shape<WarpgroupShape<Sum, kExact, 1, 1, 32, 16>>(args, launch);
    }
    if (wide) return launch_shape<WarpgroupShape<Sum, kExact, 1, 1, 64, 5, 2, 2>>(args, launch);
    return launch_shape<WarpgroupShape<Sum, kExact, 1, 1, 32, 16, 4>>(args, launch);
  }
  const auto cost = [&](int rows, int columns, int cycles) { return (tiles(rows, columns) + sms - 1) / sms * cycles; };
  const int64_t large = cost(256, 128, 1024), middle = cost(128, 128, 560), small = cost(128, 64, 300);
  if (large <= middle && large <= small)
    return launch_shape<WarpgroupShape<Sum, kExact, 2, 2, 128, 3, 2>>(args, launch);
  if (middle <= small) return launch_shape<WarpgroupShape<Sum, kExact, 2, 1, 128, 4, 2>>(args, launch);
  return launch_shape<WarpgroupShape<Sum, kExact, 2, 1, 64, 7, 4>>(args, launch);
}

}  // namespace

bool launch_sm90(const ScaledMmArgs& args, const Launch& launch) {
  const Lines rows(args.a, args.m, args.a_stride, 1), columns(args.b, args.n, args.b_along_n, args.b_along_k);
  if (!has_warpgroups(launch.device) || !rows.in_chunks || !columns.in_chunks || args.k == 0) return false;
  if (args.m > INT32_MAX - 256 || args.n > INT32_MAX - 256 || args.k > INT32_MAX - 256) return false;
  if (!args.is_int8) return launch_sum<float, false>(args, launch);
  if (!args.in_blocks) return launch_sum<int32_t, true>(args, launch);
  if (args.m <= 64) return launch_shape<WarpgroupShape<int32_t, false, 1, 1, 64, 5, 1, 2>>(args, launch);
  return launch_shape<WarpgroupShape<int32_t, false, 2, 1, 128, 4, 2>>(args, launch);
}

}  // namespace scaled_mm
}  // namespace pykv
