// y^T = w x^T with rows of w as first operand of mma.m16n8k16, for GPUs without warpgroups and for arrays of any alignment; made
// for a few pairs of each expert, where reading w is what counts.
//
// Eight warps of a block share 32 rows of the weight and 8 kTiles pairs, each for an eighth of the columns: what is summed in
// which order depends on the number of columns alone.  A lane copies what it wants itself, 8 neighbouring columns of four rows
// and of each of its pairs, to a place of its own in a ring in shared memory, and no warp waits for another before the end.
// In a product of 16 columns it takes four of these for 2c, 2c + 1, 2c + 8, 2c + 9 of both operands (cuda/mma.cuh).
#include "moe/expert_gemm.cuh"

namespace pykv {
namespace {

using Problem = ExpertGemmProblem;

constexpr int kSegments = kExpertGemmSegments, kThreads = 32 * kSegments, kColumns = kExpertGemmColumns;
constexpr int kRows = 32, kQuarters = kRows / 8;

template <class T_, int kTiles_>
struct Shape {
  using T = T_;
  static constexpr int kTiles = kTiles_, kPairs = 8 * kTiles;
  static constexpr int kStages = kTiles == 2 ? 4 : 3, kBlocks = kTiles == 1 ? 3 : 2;  // the latter on a multiprocessor
  static constexpr int kStageBytes = 16 * kThreads * (kQuarters + kTiles);
  static constexpr int kPitch = kRows + 4;  // of the totals of a pair: lanes of a warp meet all banks
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSegments * kPairs * kPitch * 4 <= kSharedBytes);
};

// A warp's sums, over its columns.
template <class S>
class Segment {
  using T = typename S::T;

 public:
  float total[2][S::kTiles][4] = {};

  __device__ Segment(const Problem& p, int32_t expert, int64_t row_tile, int64_t first_place, uint32_t ring)
      : p_(p), own_(ring + threadIdx.x * 16), column_(threadIdx.x % 4 * 8) {
    const int g = threadIdx.x % 32 / 4;
    const T* const weight = static_cast<const T*>(p.a.weights) + expert * p.a.weight_stride;
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const int64_t row = p.weight_row(row_tile, 8 * i + g, kRows);
      rows_[i] = row >= 0 ? weight + row * p.a.weight_row_stride : nullptr;
    }
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const int64_t row = TileRows::row_of_out(p.a.map, first_place + 8 * t + g, p.a.num_rows);
      x_[t] = row >= 0 ? static_cast<const T*>(p.a.x) + p.rows.row_of_x(p.a.map, row) * p.a.x_stride : nullptr;
    }
  }

  __device__ void run() {
    const int64_t units = (p_.a.k + kColumns - 1) / kColumns, segment = threadIdx.x / 32;
    const int begin = static_cast<int>(units * segment / kSegments);
    const int end = static_cast<int>(units * (segment + 1) / kSegments);
#pragma unroll
    for (int s = 0; s < S::kStages - 1; ++s) copy(begin + s, end, s);
    int stage = 0;
    for (int unit = begin; unit < end; ++unit) {
      cp_async_wait<S::kStages - 2>();
      copy(unit + S::kStages - 1, end, stage == 0 ? S::kStages - 1 : stage - 1);
      multiply(stage);
      if (++stage == S::kStages) stage = 0;
    }
    cp_async_wait<0>();
  }

 private:
  __device__ uint32_t place(int stage, int i) const { return own_ + stage * S::kStageBytes + i * kThreads * 16; }

  __device__ void copy(int unit, int end, int stage) const {
    if (unit < end) {
      const int64_t column = int64_t{unit} * kColumns + column_;
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) copy_columns<T>(p_, place(stage, i), rows_[i], column, true);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) copy_columns<T>(p_, place(stage, kQuarters + t), x_[t], column, false);
    }
    cp_async_commit();
  }

  __device__ void multiply(int stage) {
    uint4 w[kQuarters], x[S::kTiles];
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) w[i] = load_shared_16(place(stage, i));
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) x[t] = load_shared_16(place(stage, kQuarters + t));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 low = w[2 * r], high = w[2 * r + 1];
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        mma_16x8x16<T>(total[r][t], first, x[t].x, x[t].y);
        mma_16x8x16<T>(total[r][t], second, x[t].z, x[t].w);
      }
    }
  }

  const Problem& p_;
  uint32_t own_;
  int column_;
  const T *rows_[kQuarters], *x_[S::kTiles];
};

// What this block will read of the weight, to the L2: 128 bytes of each row of a lane's, which may be all of its columns.  The
// expert is a guess before the kernel before has ended.
template <class T>
__device__ void prefetch_weight(const Problem& p, int64_t row_tile, int32_t block) {
  const int32_t expert = __ldcg(p.a.map.weights + block);
  if (expert < 0 || expert >= p.a.map.num_weights) return;
  const int64_t units = (p.a.k + kColumns - 1) / kColumns, segment = threadIdx.x / 32;
  const int64_t column = units * segment / kSegments * kColumns + threadIdx.x % 4 * 64;
  if (column >= min(units * (segment + 1) / kSegments * kColumns, p.a.k)) return;
  const T* const weight = static_cast<const T*>(p.a.weights) + expert * p.a.weight_stride + column;
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const int64_t row = p.weight_row(row_tile, 8 * i + threadIdx.x % 32 / 4, kRows);
    if (row >= 0) prefetch(weight + row * p.a.weight_row_stride);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, S::kBlocks) expert_gemm_kernel(const __grid_constant__ Problem p) {
  using T = typename S::T;
  extern __shared__ uint4 ring[];
  uint32_t tile;
  const uint32_t row_tile = p.tiles_by(blockIdx.x, tile);  // tiles of one expert come one after another
  const int32_t block = p.rows.tiles_of_block.quotient(static_cast<int>(tile));
  if (p.fusion.map_is_old && comes_early()) prefetch_weight<T>(p, row_tile, block);
  begin_dependent();
  const int64_t first_place = int64_t{tile} * S::kPairs;
  const int32_t expert = p.a.map.weight_at(first_place, block);
  if (expert < 0) return;

  auto* const totals = reinterpret_cast<float*>(ring);  // [segment][pair][row]
  const int lane = threadIdx.x % 32;
  {
    Segment<S> segment(p, expert, row_tile, first_place, shared_address(ring));
    segment.run();
    __syncthreads();  // all have done with the ring
    float* const own = totals + threadIdx.x / 32 * S::kPairs * S::kPitch;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          own[(t * 8 + lane % 4 * 2 + e % 2) * S::kPitch + r * 16 + e / 2 * 8 + lane / 4] = segment.total[r][t][e];
  }
  __syncthreads();

  const int64_t n = p.weight_row(row_tile, lane, kRows);
  const float bias =
      p.a.bias && n >= 0 ? to_float(static_cast<const T*>(p.a.bias)[expert * p.a.map.bias_stride + n]) : 0.0f;
#pragma unroll
  for (int i = threadIdx.x / 32; i < S::kPairs; i += kSegments) {
    const int64_t row = TileRows::row_of_out(p.a.map, first_place + i, p.a.num_rows);
    if (row < 0) continue;
    float sum = totals[i * S::kPitch + lane];
#pragma unroll
    for (int s = 1; s < kSegments; ++s) sum += totals[(s * S::kPairs + i) * S::kPitch + lane];
    sum += bias;
    if (p.a.map.factors) sum *= p.a.map.factor_of(row);
    T* const to = static_cast<T*>(p.a.out) + row * p.a.out_stride + n;
    const T value = from_float<T>(sum);
    if (p.fusion.silu_and_mul) {
      const float gate = to_float(value), up = __shfl_down_sync(0xffffffffu, gate, kRows / 2);
      if (lane < kRows / 2 && n >= 0) *to = silu_times<T>(gate, up);
    } else if (n >= 0) {
      *to = value;
    }
  }
}

template <class S>
void launch_shape(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  const Problem p(args, fusion, S::kPairs);
  launch_dependent_shared(expert_gemm_kernel<S>, p.blocks(kRows), dim3(kThreads), S::kSharedBytes, launch,
                          "expert_gemm", p);
}

}  // namespace

void expert_gemm_fused_cuda(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch) {
  static_assert(kRows == 32, "a lane has a row at the end");
  const int64_t pairs = args.map.block_size & -args.map.block_size;  // of a tile, at most
  dispatch<half, bf16>(args.dtype, [&]<class T>() {
    if (expert_gemm_warpgroup<T>(args, fusion, launch)) return;
    if (pairs <= 8) return launch_shape<Shape<T, 1>>(args, fusion, launch);
    if (pairs <= 16) return launch_shape<Shape<T, 2>>(args, fusion, launch);
    launch_shape<Shape<T, 4>>(args, fusion, launch);
  });
}

void expert_gemm_cuda(const ExpertGemmArgs& args, const Launch& launch) { expert_gemm_fused_cuda(args, {}, launch); }

}  // namespace pykv
