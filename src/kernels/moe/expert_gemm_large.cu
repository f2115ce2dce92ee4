// The same with tiles of 128 rows of the weight and 64 or 128 pairs, which share what they read through shared memory.
//
// The sums of a part of the columns are added to a total of their own before those of the next part begin: the results are
// those of the kernel for a few pairs, bit by bit.
#include "moe/expert_gemm.cuh"

namespace pykv {
namespace {

using Problem = ExpertGemmProblem;

constexpr int kThreads = 256, kColumns = kExpertGemmColumns, kStages = 6;
constexpr int kRowBytes = 2 * kColumns;  // of a stage
constexpr int kRows = 128;

template <class T_, int kPairs_>
struct Shape {
  using T = T_;
  static constexpr int kPairs = kPairs_, kTiles = 4;  // of 8 pairs, of a warp
  static constexpr int kPairWarps = kPairs / (8 * kTiles), kRowWarps = 8 / kPairWarps;
  static constexpr int kBlocks = kRows / (16 * kRowWarps);  // of 16 rows, of a warp
  static constexpr int kStageBytes = (kRows + kPairs) * kRowBytes;
  static constexpr int kCopies = (kRows + kPairs) * 4 / kThreads;  // of 16 bytes, of a thread and a stage
  static constexpr int kPitch = kRows + 8;                         // of the results of a pair
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kPairs * kPitch * 2 <= kSharedBytes);
};

template <class S>
__global__ void __launch_bounds__(kThreads, S::kPairs == 64 ? 2 : 1)
    expert_gemm_large_kernel(const __grid_constant__ Problem p) {
  using T = typename S::T;
  extern __shared__ uint4 ring[];
  begin_dependent();
  uint32_t tile;
  const uint32_t row_tile = p.tiles_by(blockIdx.x, tile);  // tiles of one expert come one after another
  const int64_t first_place = int64_t{tile} * S::kPairs;
  const int32_t expert = p.a.map.weight_at(first_place, p.rows.tiles_of_block.quotient(static_cast<int>(tile)));
  if (expert < 0) return;

  // What this thread copies: 16 bytes of some rows of the weight, and of some of x.
  const T* from[S::kCopies];
  const T* const weight = static_cast<const T*>(p.a.weights) + expert * p.a.weight_stride;
#pragma unroll
  for (int i = 0; i < S::kCopies; ++i) {
    const int at = threadIdx.x / 4 + i * (kThreads / 4);
    if (i < kRows * 4 / kThreads) {
      const int64_t row = p.weight_row(row_tile, at, kRows);
      from[i] = row >= 0 ? weight + row * p.a.weight_row_stride : nullptr;
    } else {
      const int64_t row = TileRows::row_of_out(p.a.map, first_place + at - kRows, p.a.num_rows);
      from[i] = row >= 0 ? static_cast<const T*>(p.a.x) + p.rows.row_of_x(p.a.map, row) * p.a.x_stride : nullptr;
    }
  }
  const int units = static_cast<int>((p.a.k + kColumns - 1) / kColumns);
  const uint32_t base = shared_address(ring), own = base + threadIdx.x * 16;
  const auto copy = [&](int unit, int stage) {
    if (unit < units) {
      const int64_t column = int64_t{unit} * kColumns + threadIdx.x % 4 * 8;
#pragma unroll
      for (int i = 0; i < S::kCopies; ++i)
        copy_columns<T>(p, own + stage * S::kStageBytes + i * kThreads * 16, from[i], column, false);
    }
    cp_async_commit();
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % S::kRowWarps * 16 * S::kBlocks, warp_pair = warp / S::kRowWarps * 8 * S::kTiles;
  const uint32_t rows_at = base + (warp_row + lane / 4) * kRowBytes + lane % 4 * 16;
  const uint32_t pairs_at = base + (kRows + warp_pair + lane / 4) * kRowBytes + lane % 4 * 16;
  float sum[S::kBlocks][S::kTiles][4] = {}, total[S::kBlocks][S::kTiles][4] = {};

#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) copy(s, s);
  int stage = 0, part = 0, end = 0;  // of the part
  const auto go_on = [&](int unit) {
    while (end <= unit && part < kExpertGemmSegments)
      end = static_cast<int>(int64_t{units} * ++part / kExpertGemmSegments);
  };
  go_on(0);
  for (int unit = 0; unit < units; ++unit) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage is there, and all have done with the one before
    copy(unit + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    uint4 x[S::kTiles];
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) x[t] = load_shared_16(pairs_at + stage * S::kStageBytes + t * 8 * kRowBytes);
#pragma unroll
    for (int r = 0; r < S::kBlocks; ++r) {
      const uint4 low = load_shared_16(rows_at + stage * S::kStageBytes + r * 16 * kRowBytes);
      const uint4 high = load_shared_16(rows_at + stage * S::kStageBytes + (r * 16 + 8) * kRowBytes);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) mma_16x8x16<T>(sum[r][t], first, x[t].x, x[t].y);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) mma_16x8x16<T>(sum[r][t], second, x[t].z, x[t].w);
    }
    if (++stage == kStages) stage = 0;
    if (unit + 1 != end) continue;
#pragma unroll
    for (int r = 0; r < S::kBlocks; ++r)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          total[r][t][e] += sum[r][t][e];
          sum[r][t][e] = 0.0f;
        }
    go_on(unit + 1);
  }
  cp_async_wait<0>();
  __syncthreads();  // all have done with the ring

  // Results by pair, so that rows of them are written together.
  T* const results = reinterpret_cast<T*>(ring);
  const T* const bias = p.a.bias ? static_cast<const T*>(p.a.bias) + expert * p.a.map.bias_stride : nullptr;
#pragma unroll
  for (int r = 0; r < S::kBlocks; ++r)
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      const int row = warp_row + r * 16 + half_row * 8 + lane / 4;
      const int64_t of_weight = p.weight_row(row_tile, row, kRows);
      const float own_bias = bias && of_weight >= 0 ? to_float(bias[of_weight]) : 0.0f;
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int pair = warp_pair + t * 8 + lane % 4 * 2 + e;
          float value = total[r][t][2 * half_row + e] + own_bias;
          if (p.a.map.factors) {
            const int64_t to = TileRows::row_of_out(p.a.map, first_place + pair, p.a.num_rows);
            if (to >= 0) value *= p.a.map.factor_of(to);
          }
          results[pair * S::kPitch + row] = from_float<T>(value);
        }
    }
  __syncthreads();

  const bool gated = p.fusion.silu_and_mul;
  const int width = gated ? kRows / 2 : kRows;
  const int64_t first_column = int64_t{row_tile} * width, columns = p.width() - first_column;
  const bool whole = p.whole_results && columns >= width;
  for (int pair = warp; pair < S::kPairs; pair += kThreads / 32) {
    const int64_t row = TileRows::row_of_out(p.a.map, first_place + pair, p.a.num_rows);
    if (row < 0) continue;
    const T* const of_pair = results + pair * S::kPitch;
    T* const to = static_cast<T*>(p.a.out) + row * p.a.out_stride + first_column;
    if (gated) {
      T two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        two[i] = silu_times<T>(to_float(of_pair[2 * lane + i]), to_float(of_pair[kRows / 2 + 2 * lane + i]));
      if (whole) {
        reinterpret_cast<uint32_t*>(to)[lane] = pack_pair<T>(to_float(two[0]), to_float(two[1]));
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (2 * lane + i < columns) to[2 * lane + i] = two[i];
      }
    } else if (whole) {
      reinterpret_cast<uint2*>(to)[lane] = reinterpret_cast<const uint2*>(of_pair)[lane];
    } else {
      for (int i = lane; i < width && i < columns; i += 32) to[i] = of_pair[i];
    }
  }
}

template <class S>
void launch_shape(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  const Problem p(args, fusion, S::kPairs);
  launch_dependent_shared(expert_gemm_large_kernel<S>, p.blocks(kRows), dim3(kThreads), S::kSharedBytes, launch,
                          "expert_gemm", p);
}

}  // namespace

template <class T>
void expert_gemm_large(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  if (args.map.block_size % 128 != 0) return launch_shape<Shape<T, 64>>(args, fusion, launch);
  launch_shape<Shape<T, 128>>(args, fusion, launch);
}

template void expert_gemm_large<half>(const ExpertGemmArgs&, const ExpertGemmFusion&, const Launch&);
template void expert_gemm_large<bf16>(const ExpertGemmArgs&, const ExpertGemmFusion&, const Launch&);

}  // namespace pykv
