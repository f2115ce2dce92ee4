// out = a b with scales for many rows on Hopper (sm_90a), of what is usual: fp8, no groups and no bias, and rows of out of two bytes
// an element that begin at multiples of 16 bytes.  The rest is scaled_mm_sm90.cuh's, with the same bits.
//
// How long it takes from the end of one product to the first instruction of the next decides how busy the matrix units are.  So
// stages and tiles have sizes that the compiler knows, addresses are in uniform registers, and scales of blocks come without a
// warp that waits for them: those of rows with the data, those of columns in registers, 32 blocks of k at a time.  Results are
// written by the copy engine while the next tile is multiplied.
#include "cuda/cluster.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/tensor_map.cuh"
#include "cuda/wgmma8.cuh"
#include "gemm/scaled_mm_tile.cuh"

namespace pykv {
namespace scaled_mm {
namespace {

// kGroups warpgroups, each of kParts times 64 rows, and 128 columns.  With one part the next block of k is multiplied while one is
// added.  With two there are no registers for that, and the other warpgroup multiplies; so it does with scales of blocks, where that
// is faster.
// kStrided: scales of rows may lie anywhere, and warps of their own bring all scales.
template <int kGroups_, int kParts_, int kStages_, int kPieces_, bool kStrided_>
struct ManyShape {
  static constexpr int kGroups = kGroups_, kParts = kParts_, kStages = kStages_;
  static constexpr bool kStrided = kStrided_;
  static constexpr int kRows = 64 * kGroups * kParts, kColumns = 128;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kPieces = kPieces_, kPiece = kColumns / kPieces;  // columns that a warp writes at once
  // Of a stage: those of rows, and where they are strided one of columns.  What the copy engine brings lies at multiples of 128 bytes.
  static constexpr int kScales = kStrided ? kRows + 4 : kRows;
  // In shared memory.
  static constexpr uint32_t kRowBytes = kRows * kLine, kColumnBytes = kColumns * kLine, kWarpBytes = 16 * kPiece * 2;
  static constexpr uint32_t kColumnsAt = kStages * kRowBytes, kStagingAt = kColumnsAt + kStages * kColumnBytes;
  static constexpr uint32_t kScalesAt = kStagingAt + 4 * kGroups * kWarpBytes;
  static constexpr uint32_t kFullAt = (kScalesAt + kStages * kScales * 4 + 15) / 16 * 16,
                            kEmptyAt = kFullAt + kStages * 8;
  static constexpr uint32_t kBytes = kEmptyAt + kStages * 8;
  static_assert(kBytes <= 227 << 10 && kPiece % 64 == 0);
};

struct ManyOperands {
  CUtensorMap rows, columns, out, row_scales;
  MmScales a_scales, b_scales;
  int m, n, blocks;
  uint32_t row_tiles, column_tiles;
  bool in_blocks, is_bfloat16;
};

// The compiler does not see that this is a loop: after one it would ask the warp to meet again.
[[maybe_unused]] __device__ inline void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done:}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}
[[maybe_unused]] __device__ inline float load_shared_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
  return x;
}

template <class S>
struct ManyTurn {
  uint32_t stage = 0, parity = 0;
  __device__ void next() {
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// Tiles that are worked on at the same time share lines in the L2: those of 2048 rows, column by column.
template <class S, class F>
__device__ void for_tiles(const ManyOperands& o, F&& f) {
  constexpr uint32_t kBand = 16 / S::kParts;
  const uint32_t tiles = o.row_tiles * o.column_tiles;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const uint32_t band = index / (kBand * o.column_tiles), within = index - band * kBand * o.column_tiles;
    const uint32_t height = min(kBand, o.row_tiles - band * kBand);
    f(static_cast<int>((band * kBand + within % height) * S::kRows), static_cast<int>(within / height * S::kColumns));
  }
}

template <class S>
__device__ void fill(const ManyOperands& o, uint32_t shared) {
  ManyTurn<S> turn;
  const bool with_scales = !S::kStrided && o.in_blocks;
  const uint32_t bytes = S::kRowBytes + S::kColumnBytes + (with_scales ? S::kRows * 4 : 0);
  for_tiles<S>(o, [&](int row, int column) {
#pragma unroll 1
    for (int block = 0; block < o.blocks; ++block, turn.next()) {
      const uint32_t full = shared + S::kFullAt + turn.stage * 8;
      wait_for(shared + S::kEmptyAt + turn.stage * 8, turn.parity ^ 1);
      cluster_expect(full, bytes);
      copy_box(shared + turn.stage * S::kRowBytes, o.rows, {block * kLine, row}, full);
      copy_box(shared + S::kColumnsAt + turn.stage * S::kColumnBytes, o.columns, {block * kLine, column}, full);
      if (with_scales) copy_box(shared + S::kScalesAt + turn.stage * S::kScales * 4, o.row_scales, {row, block}, full);
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
  ManyTurn<S> turn;
  for_tiles<S>(o, [&](int row, int column) {
#pragma unroll 1
    for (int block = 0; block < o.blocks; ++block, turn.next()) {
      if (mine-- != 0) continue;
      mine = kFillers - 1;
      wait_for(shared + S::kEmptyAt + turn.stage * 8, turn.parity ^ 1);
      const uint32_t to = shared + S::kScalesAt + turn.stage * S::kScales * 4;
#pragma unroll
      for (int line = lane; line < S::kRows; line += 32)
        if (row + line < o.m) copy(to + line * 4, o.a_scales, row + line, block);
      if (lane == 0) copy(to + S::kRows * 4, o.b_scales, column / ScaledMmArgs::kBlock, block);
      cp_async_arrive(shared + S::kFullAt + turn.stage * 8);
    }
  });
}

template <class S>
struct ManyMultiplier {
  static constexpr int kSums = S::kColumns / 2;  // of a lane, for 64 rows

  const ManyOperands& o;
  const uint32_t shared;
  const int group, warp, lane;
  ManyTurn<S> turn;
  float total[S::kParts][kSums];
  // Scales of the tile's columns.  Those of blocks: a lane has every 32nd block's, and the one 32 blocks further on.  Others: it has
  // every 32nd column's.
  float of_columns[S::kColumns / 32];
  float row_factors[2];  // of its rows, if not of blocks

  // A block of k that has been given to the matrix units.
  struct Pending {
    uint32_t stage;
    float scale[2];  // of the lane's two rows
  };

  __device__ float load_of_columns(int column, int first) const {
    const int block = first + lane;
    if (block >= o.blocks) return 0.0f;
    return __ldg(static_cast<const float*>(o.b_scales.data) + column / ScaledMmArgs::kBlock * o.b_scales.along +
                 block * o.b_scales.block);
  }

  template <int kPart>
  __device__ void begin(float (&sum)[kSums], Pending& pending) {
    const uint32_t stage = turn.stage;
    if constexpr (kPart == 0) wait_for(shared + S::kFullAt + stage * 8, turn.parity);
    float of_rows[2] = {1.0f, 1.0f}, of_column = 1.0f;
    if (o.in_blocks) {
      const uint32_t scales = shared + S::kScalesAt + stage * S::kScales * 4;
      const uint32_t mine = scales + (kPart * S::kGroups * 64 + warp * 16 + lane / 4) * 4;
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
  __device__ void end(float (&sum)[kSums], Pending& pending, int column, int block) {
    constexpr bool kLast = kPart == S::kParts - 1;
    if constexpr (!S::kStrided) {
      if (o.in_blocks) {
        const float of_column = __shfl_sync(~0u, of_columns[0], block % 32);
        pending.scale[0] *= of_column;
        pending.scale[1] *= of_column;
        if (kLast && (block + 1) % 32 == 0) {
          of_columns[0] = of_columns[1];
          of_columns[1] = load_of_columns(column, block + 33);
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

  __device__ void multiply_plain(int column) {
    float sum[kSums];
#pragma unroll 2
    for (int block = 0; block < o.blocks; ++block) {
      Pending pending;
      begin<0>(sum, pending);
      if constexpr (S::kParts > 1) {
        end<0, 0>(sum, pending, column, block);
        begin<S::kParts - 1>(sum, pending);
      }
      turn.next();
      end<S::kParts - 1, 0>(sum, pending, column, block);
    }
  }

  __device__ void multiply_rolling(int column) {
    float sum[2][kSums];
    Pending even, odd;
    begin<0>(sum[0], even);
    turn.next();
    int block = 1;
#pragma unroll 2
    for (; block + 1 < o.blocks; block += 2) {
      begin<0>(sum[1], odd);
      turn.next();
      end<0, 1>(sum[0], even, column, block - 1);
      begin<0>(sum[0], even);
      turn.next();
      end<0, 1>(sum[1], odd, column, block);
    }
    if (block < o.blocks) {
      begin<0>(sum[1], odd);
      turn.next();
      end<0, 1>(sum[0], even, column, block - 1);
      end<0, 0>(sum[1], odd, column, block);
    } else {
      end<0, 0>(sum[0], even, column, block - 1);
    }
  }

  // Scales that are not those of blocks: asked for before products are summed.
  __device__ void load_factors(int row, int column) {
    const auto* const rows = static_cast<const float*>(o.a_scales.data);
    const auto* const columns = static_cast<const float*>(o.b_scales.data);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      row_factors[i] = __ldg(rows + int64_t{min(row + warp * 16 + 8 * i + lane / 4, o.m - 1)} * o.a_scales.along);
#pragma unroll
    for (int i = 0; i < S::kColumns / 32; ++i)
      of_columns[i] = __ldg(columns + int64_t{min(column + 32 * i + lane, o.n - 1)} * o.b_scales.along);
  }
  __device__ void scale_all() {
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_column = __shfl_sync(~0u, of_columns[j / 4], j % 4 * 8 + lane % 4 * 2 + e);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = total[0][4 * j + 2 * i + e];
          x = row_factors[i] * (of_column * x);
        }
      }
  }

  // By the copy engine, which leaves out what is outside: a warp's 16 rows, by way of shared memory.
  template <class T>
  __device__ void store(int row, int column) const {
    const uint32_t staging = shared + S::kStagingAt + warp * S::kWarpBytes;
#pragma unroll
    for (int part = 0; part < S::kParts; ++part)
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) {
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int eight = 0; eight < S::kPiece / 8; eight += 2) {
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
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int box = 0; box < S::kPiece / 64; ++box)
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                             reinterpret_cast<uint64_t>(&o.out)),
                         "r"((column + piece * S::kPiece + box * 64) * 2),
                         "r"(row + part * S::kGroups * 64 + warp * 16), "r"(staging + box * 16 * kLine)
                         : "memory");
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
        __syncwarp();
      }
  }

  __device__ void run() {
    for_tiles<S>(o, [&](int row, int column) {
      if (S::kParts == 1 && !o.in_blocks) {
        load_factors(row, column);
      } else if constexpr (!S::kStrided) {
        of_columns[0] = load_of_columns(column, 0);
        of_columns[1] = load_of_columns(column, 32);
      }
#pragma unroll
      for (int part = 0; part < S::kParts; ++part)
#pragma unroll
        for (float& x : total[part]) x = 0.0f;
      if (S::kParts > 1 || (S::kGroups > 1 && o.in_blocks)) {
        multiply_plain(column);
      } else {
        multiply_rolling(column);
      }
      if (S::kParts == 1 && !o.in_blocks) scale_all();
      if (o.is_bfloat16) {
        store<bf16>(row, column);
      } else {
        store<half>(row, column);
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
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(shared + S::kFullAt + i * 8, S::kStrided && o.in_blocks ? 1 + 32 : 1);
      mbarrier_init(shared + S::kEmptyAt + i * 8, 4 * S::kGroups);
    }
    fence_async_proxy();
    prefetch_map(o.rows);
    prefetch_map(o.columns);
    prefetch_map(o.out);
  }
  __syncthreads();
  begin_dependent();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp >= 4 * S::kGroups) {
    if constexpr (S::kGroups > 1) give_registers<40>();
    if (warp == 4 * S::kGroups && lane == 0) fill<S>(o, shared);
    if (S::kStrided && o.in_blocks && warp > 4 * S::kGroups) fill_scales<S>(o, shared, warp - 4 * S::kGroups - 1);
  } else {
    if constexpr (S::kGroups > 1) take_registers<232>();
    ManyMultiplier<S> multiplier{o, shared, S::kGroups > 1 ? warp / 4 : 0, warp, lane, {}};
    multiplier.run();
  }
#endif
}

// Scales of rows as floats side by side, of which a column of a tile is a box; what is outside is zero.
bool map_row_scales(CUtensorMap& map, const ScaledMmArgs& args, int rows) {
  const MmScales& s = args.a_scales;
  const auto encode = tensor_map_encoder();
  const int64_t stride = args.blocks() > 1 ? s.block : (args.m + 3) / 4 * 4;
  if (!encode || s.along != 1 || stride % 4 != 0 || !is_aligned(16, s.data, {})) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(args.m), static_cast<cuuint64_t>(args.blocks())};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 4};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(rows), 1}, ones[2] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<void*>(s.data), sizes, strides, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class S>
bool launch_shape(const ScaledMmArgs& args, const Launch& launch) {
  ManyOperands o{};
  const auto tiles_of = [](int64_t size, int each) { return static_cast<uint32_t>((size + each - 1) / each); };
  o.row_tiles = tiles_of(args.m, S::kRows);
  o.column_tiles = tiles_of(args.n, S::kColumns);
  const int64_t tiles = int64_t{o.row_tiles} * o.column_tiles;
  if (tiles > INT32_MAX) return false;
  o.a_scales = args.a_scales;
  o.b_scales = args.b_scales;
  o.m = static_cast<int>(args.m);
  o.n = static_cast<int>(args.n);
  o.blocks = static_cast<int>(args.blocks());
  o.in_blocks = args.in_blocks;
  o.is_bfloat16 = args.out_dtype == DType::kBFloat16;
  if (!make_tensor_map(o.rows, args.a, {args.k, args.m}, {args.a_stride}, {S::kRows}) ||
      !make_tensor_map(o.columns, args.b, {args.k, args.n}, {args.b_along_n}, {S::kColumns}) ||
      !make_tensor_map(o.out, args.out, {2 * args.n, args.m}, {2 * args.out_stride}, {16}))
    return false;
  if (!S::kStrided && o.in_blocks && !map_row_scales(o.row_scales, args, S::kRows)) return false;
  const auto most = static_cast<int64_t>(num_sms(launch.device));
  launch_dependent_shared(scaled_mm_many_sm90_kernel<S>, dim3(static_cast<unsigned>(tiles < most ? tiles : most)),
                          dim3(S::kThreads), S::kBytes, launch, "scaled_mm", o);
  return true;
}

}  // namespace

bool launch_many_sm90(const ScaledMmArgs& args, const Launch& launch) {
  if (args.is_int8 || args.groups.count > 0 || args.bias || args.m <= 64 || args.n < 8) return false;
  if (args.a_scales.is_e8m0 || args.b_scales.is_e8m0 || args.n > INT32_MAX / 4) return false;
  if (args.out_dtype == DType::kFloat32 || !is_aligned(16, args.out, {2 * args.out_stride})) return false;
  // Rounds of tiles.  Small ones are slower for each row.  Those of 256 rows read least, and are for scales of blocks only; they
  // pay if k is long.
  const int64_t sms = num_sms(launch.device), column_tiles = (args.n + 127) / 128;
  const auto rounds = [&](int64_t rows) { return ((args.m + rows - 1) / rows * column_tiles + sms - 1) / sms; };
  if (5 * rounds(64) < 8 * rounds(128)) return launch_shape<ManyShape<1, 1, 8, 1, true>>(args, launch);
  if (args.in_blocks && args.k >= 4096 && 40 * rounds(256) <= 21 * rounds(128))
    return launch_shape<ManyShape<2, 2, 4, 2, false>>(args, launch);
  return launch_shape<ManyShape<2, 1, 5, 1, false>>(args, launch);
}

}  // namespace scaled_mm
}  // namespace pykv
