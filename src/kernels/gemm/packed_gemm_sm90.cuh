// packed_gemm on Hopper (sm_90a), for any number of tokens, rows of x.
//
// A block computes 128 rows of the weight times 8 to 128 tokens: y^T = w x^T, so that one token is padded to 8, and the codes,
// decoded in registers, are the operand of the matrix units that may lie there.  Eight warps multiply 16 rows each: by wgmma, or
// by mma.sync (Shape::kByWarpgroups says which), with the same bits (packed_multiplier_sm90.cuh).  One thread
// fills a ring of stages of 128 columns (packed_ring_sm90.cuh) with codes and x by bulk copies.  Three or seven warps make what the
// sums of groups are multiplied by: of whatever kind scales are, the multiplying warps read floats.  They also copy rows of x that a
// tensor map cannot describe (packed_feed_sm90.cuh).
//
// Integers in small groups, tables, and int4 with scales of float16 where x is bfloat16, are multiplied by their scales as they are
// decoded (Folding in packed_codes.cuh): then warps copy factors as they are stored, and the multiplying warps make pairs of 16 bits
// of them.  Of float16, what the factors of 128 columns have in common is found first, but for those of bytes, where that is a power
// of two for 256 columns.
//
// Of many experts with many tokens each, blocks walk over tiles of int4: the ring is filled for the next while results of one are
// written, and these are rounded before they are exchanged.
//
// Where there are tiles for all SMs, as those of many experts, two blocks of half as many warps share an SM: one begins and ends
// while the other multiplies.
//
// Columns of codes lie in the order of packed_weight.h, of x in their own: a lane takes its codes from two lanes' places.
//
// The columns are cut into 2 or 4 segments, by the shape of the weight alone.  With up to 64 tokens, eight more warps of the block
// sum some of them, with few tiles a second block of a cluster; with many, a block sums all, one after another.  They are added
// in the same order: a row of out has the same bits whatever the number of rows.
//
// int4 with groups of 128 and scales of float16, 8192 x 8192, on an H200: 16 tokens take 15.7 us, 64 20.1, where a plain read of as many
// bytes takes 9.0 and a ring that only copies 10.1; 256 take 52.  Up to 64 tokens wait for decoding, which more warps do sooner.  What
// bounds many is that instructions beside wgmma take their time from it (docs/log/packed_gemm.md), so weights that are scaled as they are
// decoded have one sum for all of a segment.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/vec.cuh"
#include "gemm/packed_epilogue.cuh"
#include "gemm/packed_feed_sm90.cuh"
#include "gemm/packed_gemm_few_sm90.h"
#include "gemm/packed_multiplier_sm90.cuh"

namespace pykv {
namespace packed_gemm_sm90 {  // not an unnamed one, whose members the compiler would report where code for sm_90a lacks

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Rounds sums [piece][token][kPitch], the last piece at `last`, added up over the pieces of all blocks of the cluster, to rows of
// out: each `splits`-th.
template <class S>
__device__ void write(const Problem& p, const int32_t (&of_out)[S::kTokens], uint32_t sums, uint32_t last,
                      int64_t first_row, int rank, int32_t weight) {
  using T = typename S::Element;
  const int lane = threadIdx.x % 32, splits = p.splits;
  const int64_t n = first_row + lane * 4;
  const int rows = static_cast<int>(min(max(p.weight.n - n, int64_t{0}), int64_t{4}));
  float of_row[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (p.bias && i < rows) of_row[i] = to_float(static_cast<const T*>(p.bias)[weight * p.map.bias_stride + n + i]);
#pragma unroll 1
  for (int token = threadIdx.x / 32 * splits + rank; token < p.tokens; token += S::kMultipliers / 32 * splits) {
    const int row = of_out[token];
    if (row < 0) continue;
    const uint32_t in_piece = (token * kPitch + lane * 4) * 4, at = sums + in_piece;
    float4 sum;
    if (!p.keeps()) {
      sum = load_shared_float4(last + in_piece);
    } else {
      const int pieces = p.each * S::kParts;  // of a block
      float4 pieces_of[kMostSegments];
#pragma unroll
      for (int s = 0; s < kMostSegments; ++s)
        if (s < p.segments) {
          const uint32_t piece =
              S::kLastInRing && s % pieces == pieces - 1 ? last + in_piece : at + s % pieces * S::kSumBytes;
          pieces_of[s] =
              splits == 1 ? load_shared_float4(piece) : load_cluster_float4(cluster_address(piece, s / pieces));
        }
      sum = pieces_of[0];
#pragma unroll
      for (int s = 1; s < kMostSegments; ++s)
        if (s < p.segments) {
          sum.x += pieces_of[s].x;
          sum.y += pieces_of[s].y;
          sum.z += pieces_of[s].z;
          sum.w += pieces_of[s].w;
        }
    }
    if (p.epilogue.any) {
      finish_four<T>(p.epilogue, static_cast<const T*>(p.bias), sum, row, n, rows, p.out, p.out_stride);
      continue;
    }
    const float factor = p.map.factor_of(row);
    const float v[4] = {(sum.x + of_row[0]) * factor, (sum.y + of_row[1]) * factor, (sum.z + of_row[2]) * factor,
                        (sum.w + of_row[3]) * factor};
    T* const to = static_cast<T*>(p.out) + row * p.out_stride + n;
    if (p.whole_stores && rows == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < rows) to[i] = from_float<T>(v[i]);
    }
  }
}

// Rounded sums [token][kRoundedPitch bytes] to rows of out.
template <class S>
__device__ __forceinline__ void write_rounded(const Problem& p, const int32_t (&of_out)[S::kTokens], uint32_t sums,
                                              int64_t first_row) {
  constexpr int kTogether = S::kMultipliers / 16, kEach = S::kTokens / kTogether;  // tokens at once; of a thread
  const int chunk = threadIdx.x % 16, first = threadIdx.x / 16;
  if (first_row + chunk * 8 >= p.weight.n) return;
  uint4 v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) v[i] = load_shared_16(sums + (first + i * kTogether) * kRoundedPitch + chunk * 16);
  uint16_t* const out = static_cast<uint16_t*>(p.out) + first_row + chunk * 8;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t row = of_out[first + i * kTogether];
    if (row >= 0) *reinterpret_cast<uint4*>(out + row * p.out_stride) = v[i];
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) packed_gemm_sm90_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename S::Element;
  extern __shared__ uint8_t unaligned[];
  __shared__ uint64_t barriers[2 * kMostStages];
  __shared__ uint32_t table[S::kHasTable ? 256 : 1];
  __shared__ int32_t rows[S::kTokens];  // of out
  __shared__ float factors[S::kWalks ? S::kTokens : 1];
  const uint32_t start = shared_address(unaligned), data = (start + kAlignment - 1) / kAlignment * kAlignment;
  const uint32_t full = shared_address(barriers);
  const Ring ring{data, full, full + kMostStages * 8, p.stage_bytes};
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(ring.full + i * 8, 1 + (p.gathers ? S::kCopiers : 0) + (S::kFolds ? 32 + p.has_units : 1));
      mbarrier_init(ring.empty + i * 8, 8);  // warps of a part
    }
    fence_async_proxy();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    prefetch_map(p.codes);
    if (!p.gathers) prefetch_map(p.x);
  }
  const int split = static_cast<int>(blockIdx.x % p.splits);
  begin_dependent();
  Tiles<S> tiles(p);
  if constexpr (!S::kWalks) {
    if (tiles.weight < 0) return;  // all blocks of the cluster
    if (threadIdx.x < S::kTokens) rows[threadIdx.x] = p.row(tiles.token, threadIdx.x);
  }
  if constexpr (S::kHasTable) {
    const auto* numbers = reinterpret_cast<const float*>(p.weight.data + tiles.shift() + PackedWeight::kTableAt);
    if (threadIdx.x < 256)
      table[threadIdx.x] = pack_pair<T>(__ldg(numbers + threadIdx.x % 16), __ldg(numbers + threadIdx.x / 16));
  }
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  Turn turn;
  const auto each_tile = [&](auto&& with) {
#pragma unroll 1
    for (bool more = tiles.begins(); more; more = tiles.next()) with();
  };
  if (warp >= S::kMultipliers / 32) {
    const int own = warp - S::kMultipliers / 32 - 1;
    if (S::kGatherers != 0 && own >= S::kPreparers) {
      if constexpr (S::kGatherers != 0) give_registers<48>();
      if (p.gathers) each_tile([&] { gather<S>(p, ring, threadIdx.x % 128, tiles, split, turn); });
    } else {
      if constexpr (!S::kFew) give_registers<S::kGiven>();
      if (own < 0) {
        if (S::kFillsFactors || threadIdx.x % 32 == 0) each_tile([&] { fill<S>(p, ring, tiles, split, turn); });
      } else {
        each_tile([&] { Preparer<S>(p, ring, tiles, own).run(split, turn); });
      }
    }
    if (p.splits > 1) {  // the sums of all blocks are there
      __syncwarp();
      cluster_announce_all();
      cluster_wait();
    }
  } else if constexpr (S::kWalks) {
    take_registers<200>();
    const uint32_t kept = data + p.stages * p.stage_bytes;
#pragma unroll 1
    for (bool more = tiles.begins(); more; more = tiles.next()) {
      const int32_t row = threadIdx.x < S::kTokens ? p.row(tiles.token, threadIdx.x) : -1;
      {
        Multiplier<S> multiplier(p, ring, table, tiles.shift());
        multiplier.run(0, turn);
        if (threadIdx.x < S::kTokens) rows[threadIdx.x] = row;
        if (p.map.factors && threadIdx.x < S::kTokens) factors[threadIdx.x] = row < 0 ? 0.0f : p.map.factor_of(row);
        const int64_t n = int64_t{tiles.row} * kRows + warp * 16 + threadIdx.x % 32 / 4;
        float bias[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (p.bias && n + i * 8 < p.weight.n)
            bias[i] = to_float(static_cast<const T*>(p.bias)[tiles.weight * p.map.bias_stride + n + i * 8]);
        named_barrier_sync(1, S::kMultipliers);  // all have added up their segments
        multiplier.store_rounded(kept, bias, p.map.factors ? shared_address(factors) : 0);
      }
      named_barrier_sync(1, S::kMultipliers);
      write_rounded<S>(p, rows, kept, int64_t{tiles.row} * kRows);
      named_barrier_sync(1, S::kMultipliers);  // rows and what is kept are free
    }
  } else {
    if constexpr (!S::kFew) take_registers<S::kTaken>();
    {
      Multiplier<S> multiplier(p, ring, table, tiles.shift());
      const int part = S::kParts == 1 ? split : split * S::kParts + warp / 8;
      turn.advance(part % S::kParts, p.stages);
      multiplier.run(part, turn);
      if (S::kAllInRing || S::kLastInRing || !p.keeps()) {
        named_barrier_sync(1, S::kMultipliers);  // all have done with the ring
        multiplier.store(data + (S::kAllInRing ? part % 2 * S::kSumBytes : 0));
      }
    }
    if (p.splits > 1) {
      cluster_announce_all();
      cluster_wait();
    } else {
      named_barrier_sync(1, S::kMultipliers);
    }
    write<S>(p, rows, S::kAllInRing ? data : data + p.stages * p.stage_bytes, data, int64_t{tiles.row} * kRows, split,
             tiles.weight);
  }
  if (p.splits > 1) {  // nobody reads here any more
    __syncwarp();
    cluster_announce();
    cluster_wait();
  }
#endif
}

// Lines of the codes of 16 rows, of each weight.
template <class S>
bool make_codes_map(CUtensorMap& map, const PackedGemmArgs& args) {
  const PackedWeight& w = args.weight;
  constexpr int kPlanes = S::Code::kPlanes;
  const int64_t units = w.padded_k / kUnit, blocks = w.padded_n() / 16, line = units * kPlanes * 512;
  const bool several = args.map.rows && args.map.num_weights > 1;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(units * 128), static_cast<cuuint64_t>(blocks),
                               static_cast<cuuint64_t>(several ? args.map.num_weights : 1)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(line),
                                 static_cast<cuuint64_t>(several ? args.map.weight_stride : line * blocks)};
  const cuuint32_t box[3] = {256, kRows / 16, 1}, steps[3] = {1, 1, 1};
  const auto encode = tensor_map_encoder();
  return encode && encode(&map, kPlanes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT64, 3,
                          const_cast<uint8_t*>(w.codes), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class S>
void launch_shape(const PackedGemmArgs& args, const Launch& launch, int splits) {
  const PackedWeight& w = args.weight;
  const TileMap& map = args.map;
  const int64_t per_block = map.rows ? map.block_size & -map.block_size : S::kTokens;
  const int tokens = static_cast<int>(per_block < S::kTokens ? per_block : S::kTokens);
  const int64_t token_tiles =
      map.rows ? map.num_blocks * (map.block_size / tokens) : (args.num_rows + tokens - 1) / tokens;
  const int64_t row_tiles = (w.n + kRows - 1) / kRows;
  const auto aligned = [](const void* pointer, int64_t stride, int count) {
    return reinterpret_cast<uintptr_t>(pointer) % (2 * count) == 0 && stride % count == 0;
  };
  const int64_t x_stride = map.rows || args.num_rows > 1 ? args.x_stride : (w.k + 7) / 8 * 8;
  const int segments = segments_of(w, num_sms(launch.device));
  if (splits > segments / S::kParts) splits = segments / S::kParts;
  CUtensorMap x_map{};
  const bool gathers = map.rows || w.columns || args.x_step != 1 || w.k == 0 || !aligned(args.x, x_stride, 8) ||
                       !make_tensor_map(x_map, args.x, {w.k * 2, args.num_rows}, {x_stride * 2}, {S::kTokens});
  if constexpr (S::kAllInRing)
    if (gathers || segments != 2 * splits) return launch_shape<typename S::OfOnePart>(args, launch, splits);
  const bool can_have_stages =
      !S::kFolds || (S::kHasStages && w.minima_kind == MinimumKind::kNone && w.scales_kind == ScaleKind::kF16);
  CUtensorMap codes{};
  if (w.padded_k > 0 && !make_codes_map<S>(codes, args)) fail(PYKV_RUNTIME_ERROR, "packed_gemm: no tensor map");
  Problem p{.x = x_map,
            .codes = codes,
            .weight = w,
            .from = args.x,
            .out = args.out,
            .bias = args.bias,
            .epilogue = args.epilogue,
            .num_rows = args.num_rows,
            .x_stride = x_stride,
            .x_step = args.x_step,
            .out_stride = args.out_stride,
            .map = map,
            .rows = TileRows(map, tokens),
            .groups_by = Divider(w.group_size),
            .tokens = tokens,
            .row_tiles = static_cast<uint32_t>(row_tiles),
            .token_tiles = static_cast<uint32_t>(token_tiles),
            .bands = static_cast<int>(w.padded_n() / 32),
            .groups = static_cast<int>(w.groups()),
            .blocks = static_cast<int>((w.padded_k + 255) / 256),
            .segments = segments,
            .splits = splits,
            .each = segments / splits / S::kParts,
            .steps = can_have_stages && (w.group_size % kColumns == 0 || w.groups() <= 1) ? 8 : w.steps_of_a_group(),
            .items = 0,
            .stages = 0,
            .stage_bytes = 0,
            .scales_at = S::kScalesAt,
            .minima_at = 0,
            .supers_at = 0,
            .lows_at = 0,
            .units_at = 0,
            .has_units = false,
            .gathers = gathers,
            .whole_chunks = !w.columns && args.x_step == 1 && w.k % 8 == 0 && aligned(args.x, x_stride, 8),
            .whole_stores = aligned(args.out, args.out_stride, 4)};
  p.items = 8 / p.steps;
  p.minima_at = S::kScalesAt + p.items * kRows * 4;
  p.stage_bytes = p.minima_at + (w.minima ? p.items * kRows * 4 : 0);
  if (S::kFolds) {
    p.minima_at = S::kScalesAt + p.items * kRows * bytes_of(w.scales_kind);
    p.supers_at = p.minima_at + p.items * kRows * bytes_of(w.minima_kind);
    p.lows_at = p.supers_at + 2 * kRows * (w.supers != nullptr);
    p.units_at = p.lows_at + 2 * kRows * (w.lows != nullptr);
    p.has_units = S::kHasUnits && !are_bytes(w, p.steps);
    p.stage_bytes = p.units_at + 4 * kRows * p.has_units;
  }
  p.stage_bytes = (p.stage_bytes + kAlignment - 1) / kAlignment * kAlignment;
  // Sums of segments: of each that this block has, or of those so far.
  const int pieces = segments / splits - (S::kLastInRing ? 1 : 0);
  const int whole = S::kAllInRing       ? 0
                    : p.each < segments ? pieces * S::kSumBytes
                    : S::kRunsOn        ? (S::kWalks ? S::kTokens * kRoundedPitch : 0)
                                        : S::kTokens * kRows * 4;
  const int most = kSharedOfSm / S::kBlocks - kOfSystem - kAlignment - kStatic - whole;
  p.stages = most / p.stage_bytes < kMostStages ? most / p.stage_bytes : kMostStages;
  p.stages -= p.stages % S::kParts;
  const int64_t tiles = row_tiles * token_tiles * splits, sms = num_sms(launch.device);
  if (tiles > INT32_MAX || row_tiles * 8 > INT32_MAX || args.num_rows > INT32_MAX - S::kTokens)
    fail(PYKV_VALUE_ERROR, "x: has too many rows: %lld", static_cast<long long>(args.num_rows));
  int bytes = kAlignment + p.stages * p.stage_bytes + whole;
  const int for_sums = kAlignment + (S::kAllInRing ? 2 : 1) * S::kSumBytes;
  if (bytes < for_sums) bytes = for_sums;
  const auto kernel = packed_gemm_sm90_kernel<S>;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "packed_gemm");
  launch_clusters(kernel, dim3(static_cast<unsigned>(S::kWalks && tiles > sms ? sms : tiles)), dim3(S::kThreads),
                  static_cast<unsigned>(splits), static_cast<size_t>(bytes), launch, "packed_gemm", p);
}

// Int4 without minima, with scales of float16 for whole stages.
inline bool has_whole_stages(const PackedWeight& w) {
  return w.minima_kind == MinimumKind::kNone && w.scales_kind == ScaleKind::kF16 &&
         (w.group_size % kColumns == 0 || w.groups() <= 1);
}

template <class T, CodeKind kKind, Minima kMinima>
void launch_tokens(const PackedGemmArgs& args, const Launch& launch) {
  const TileMap& map = args.map;
  const int64_t row_tiles = (args.weight.n + kRows - 1) / kRows, sms = num_sms(launch.device);
  const int64_t tokens = map.rows ? map.block_size & -map.block_size : args.num_rows;
  const auto tiles = [&](int64_t of) {
    return row_tiles *
           (map.rows ? map.num_blocks * map.block_size / (tokens < of ? tokens : of) : (args.num_rows + of - 1) / of);
  };
  // Tiles of 128 tokens with half of the columns each, rather than as many of 64 tokens: codes are decoded for more of them.
  const bool shares = !map.rows && tiles(128) * 2 <= sms && tiles(64) * 2 > sms;
  const auto run = [&]<int kTokens>() {
    const int64_t count = tiles(kTokens);
    if constexpr (kTokens > kMostFew && kKind == CodeKind::kUint4 &&
                  (kMinima == Minima::kNone || kMinima == Minima::kSubtracted ||
                   (kMinima == Minima::kFolded && !kIsHalf<T>)))
      if ((kMinima != Minima::kFolded || has_whole_stages(args.weight)) && map.rows && count > sms &&
          args.weight.n % 8 == 0 && !args.epilogue.any && args.out_stride % 8 == 0 &&
          reinterpret_cast<uintptr_t>(args.out) % 16 == 0)
        return launch_shape<Shape<T, kKind, kTokens, kMinima, 1, true>>(args, launch, 1);
    const int splits = (kTokens <= 64 || shares) && count * 2 <= sms ? 2 : 1;
    if constexpr (kTokens <= kMostFew)
      if (count < sms) return launch_shape<Shape<T, kKind, kTokens, kMinima, 2>>(args, launch, splits);
    if constexpr (kTokens == 64 && Shape<T, kKind, kTokens, kMinima, 1>::kRunsOn)
      return launch_shape<Shape<T, kKind, kTokens, kMinima, 2>>(args, launch, splits);
    launch_shape<Shape<T, kKind, kTokens, kMinima, 1>>(args, launch, splits);
  };
  constexpr bool kIsRare = kKind == CodeKind::kUint8 && kMinima == Minima::kSubtracted;
  if constexpr (!kIsRare)  // whose few tokens take the next larger tile: 11 % more time
    if (tokens <= 8) return run.template operator()<8>();
  if (tokens <= 16) return run.template operator()<16>();
  if (tokens <= 32) return run.template operator()<32>();
  if (tokens <= 64 || (tiles(64) <= sms && !shares)) return run.template operator()<64>();
  run.template operator()<128>();
}

}  // namespace packed_gemm_sm90
}  // namespace pykv
