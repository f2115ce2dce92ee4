// out^T = alpha b a^T by mma.m16n8k16 of halves: a code of four bits times its scale of eight is exact in 16 bits.
//
// Eight warps of a block share 32 rows of b and some rows of a, each for an eighth of k: what is added when depends on k alone.
// A lane copies what it wants itself, 16 neighbours that share a scale, to a place of its own in a ring in shared memory, and
// no warp waits for another before the end.
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/divider.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"
#include "gemm/fp4_codes.cuh"
#include "gemm/fp4_mm.h"
#include "gemm/store_as.cuh"

namespace pykv {
namespace {

constexpr int kSegments = Fp4MmArgs::kSegments, kThreads = 32 * kSegments,
              kUnit = 64;  // elements of a row that four lanes take at once
constexpr int kColumns = 32;

// kTiles of 8 rows of a.
template <int kTiles_>
struct Fp4Shape {
  static constexpr int kTiles = kTiles_, kRows = 8 * kTiles;
  static constexpr int kLines = 4 + kTiles;  // of a lane: rows of b, rows of a
  static constexpr int kStageBytes = kLines * kThreads * 12;
  static constexpr int kMostStages = (96 << 10) / kStageBytes, kStages = kMostStages > 6 ? 6 : kMostStages;
  static constexpr int kPitch = kColumns + 4;  // of the sums of a row
  static constexpr int kSumBytes = kSegments * kRows * kPitch * 4;
  static constexpr int kSharedBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static_assert(kStages >= 3);
};

struct Fp4Problem {
  Fp4MmArgs args;
  Divider tiles;  // of rows of a
  bool in_words;  // rows and scales are aligned for copies of 8 and of 4 bytes
};

// A lane's own line of a matrix.
struct Fp4Line {
  const uint8_t* codes;   // null: there is no such row
  const uint8_t* scales;  // of its first four groups; 512 bytes to the next four
  int64_t step;           // from a byte of codes to the next

  __device__ Fp4Line(const Fp4MmArgs& args, const uint8_t* data, const uint8_t* all_scales, int64_t row, int64_t rows,
                     int64_t stride, int64_t step)
      : codes(row < rows ? data + row * stride : nullptr),
        scales(all_scales + args.scale_at(row < rows ? row : 0, 0)),
        step(step) {}

  // To 8 bytes at `to` and 4 at `scales_to`.
  __device__ void copy(uint32_t to, uint32_t scales_to, int64_t unit, int64_t k, bool in_words) const {
    const int64_t at = unit * (kUnit / 2) + threadIdx.x % 4 * 8;
    const bool inside = codes && at < k / 2;
    if (in_words) {
      cp_async_small<8>(to, inside ? codes + at : scales, inside);
      cp_async_small<4>(scales_to, scales + unit * 512, true);
      return;
    }
    uint32_t words[3] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (inside) words[i / 4] |= static_cast<uint32_t>(__ldg(codes + (at + i) * step)) << i % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[2] |= static_cast<uint32_t>(__ldg(scales + unit * 512 + i)) << i * 8;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(words[0]), "r"(words[1]) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(scales_to), "r"(words[2]) : "memory");
  }
};

// Eight pairs of 16 codes times their scale, 2^-7 of what they should be.  Which elements make a pair is the same for a and b.
__device__ inline void decode(uint32_t (&pairs)[8], uint32_t at, uint32_t scales_at, bool inside) {
  uint32_t words[2], scales;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(at) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(scales_at) : "memory");
  const half2 scale = fp4_scale(inside ? scales >> threadIdx.x % 4 * 8 & 0xffu : 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i] = decode_fp4(words[i / 4], i % 4, scale);
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) fp4_mm_kernel(const __grid_constant__ Fp4Problem p) {
  extern __shared__ uint4 ring[];
  begin_dependent();
  const Fp4MmArgs& args = p.args;
  uint32_t row_tile;
  const uint32_t column_tile = p.tiles(blockIdx.x, row_tile);  // tiles of the same columns come one after another
  const int64_t first_row = int64_t{row_tile} * S::kRows, first_column = int64_t{column_tile} * kColumns;
  constexpr int kStages = S::kStages;
  const int lane = threadIdx.x % 32, segment = threadIdx.x / 32;
  float sum[2][S::kTiles][4] = {};
  {
    const auto line = [&](int i) {
      return i < 4 ? Fp4Line(args, args.b, args.b_scales, first_column + i * 8 + lane / 4, args.n, args.b_stride,
                             args.b_step)
                   : Fp4Line(args, args.a, args.a_scales, first_row + (i - 4) * 8 + lane / 4, args.m, args.a_stride,
                             args.a_step);
    };
    const uint32_t base = shared_address(ring);
    const auto codes_at = [&](int stage, int i) {
      return base + stage * S::kStageBytes + (i * kThreads + threadIdx.x) * 8;
    };
    const auto scales_at = [&](int stage, int i) {
      return base + stage * S::kStageBytes + S::kLines * kThreads * 8 + (i * kThreads + threadIdx.x) * 4;
    };
    const int units = static_cast<int>((args.k + kUnit - 1) / kUnit);
    const int begin = Fp4MmArgs::segment_begin(args.k, segment) * 2,
              end = min(Fp4MmArgs::segment_begin(args.k, segment + 1) * 2, units);
    const auto copy = [&](int unit, int stage) {
      if (unit < end)
#pragma unroll
        for (int i = 0; i < S::kLines; ++i)
          line(i).copy(codes_at(stage, i), scales_at(stage, i), unit, args.k, p.in_words);
      cp_async_commit();
    };
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) copy(begin + s, s);
    int stage = 0;
#pragma unroll 1
    for (int unit = begin; unit < end; ++unit) {
      cp_async_wait<kStages - 2>();
      copy(unit + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
      const bool inside = unit * kUnit + lane % 4 * 16 < args.k;
      uint32_t b[4][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) decode(b[i], codes_at(stage, i), scales_at(stage, i), inside);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        uint32_t a[8];
        decode(a, codes_at(stage, 4 + t), scales_at(stage, 4 + t), inside);
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            mma_16x8x16<half>(
                sum[i][t],
                {b[2 * i][2 * step], b[2 * i + 1][2 * step], b[2 * i][2 * step + 1], b[2 * i + 1][2 * step + 1]},
                a[2 * step], a[2 * step + 1]);
      }
      if (++stage == kStages) stage = 0;
    }
    cp_async_wait<0>();
  }
  __syncthreads();                                    // all have done with the ring
  auto* const sums = reinterpret_cast<float*>(ring);  // [segment][row][column]
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[(segment * S::kRows + t * 8 + lane % 4 * 2 + e % 2) * S::kPitch + i * 16 + e / 2 * 8 + lane / 4] =
            sum[i][t][e];
  __syncthreads();
  const float alpha = args.alpha;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::kRows * kColumns; i += kThreads) {
    const int64_t row = first_row + i / kColumns, column = first_column + i % kColumns;
    if (row >= args.m || column >= args.n) continue;
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) total += sums[(s * S::kRows + i / kColumns) * S::kPitch + i % kColumns];
    const float x = alpha * (total * kFp4Unit);
    store_as(args.out_dtype, args.out, row * args.out_stride + column, x);
  }
}

template <class S>
void launch_fp4(const Fp4MmArgs& args, const Launch& launch) {
  const int64_t row_tiles = (args.m + S::kRows - 1) / S::kRows, blocks = (args.n + kColumns - 1) / kColumns * row_tiles;
  if (blocks > INT32_MAX)
    fail(PYKV_VALUE_ERROR, "out: has too many elements: %lld rows of %lld", static_cast<long long>(args.m),
         static_cast<long long>(args.n));
  const bool in_words = args.a_step == 1 && args.b_step == 1 && is_aligned(8, args.a, {args.a_stride}) &&
                        is_aligned(8, args.b, {args.b_stride}) && is_aligned(4, args.a_scales) &&
                        is_aligned(4, args.b_scales);
  launch_dependent_shared(fp4_mm_kernel<S>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), S::kSharedBytes,
                          launch, "fp4_mm", Fp4Problem{args, Divider(row_tiles), in_words});
}

}  // namespace

void fp4_mm_cuda(const Fp4MmArgs& args, const Launch& launch) {
  if (args.m > 32 && fp4_mm_sm90(args, launch)) return;
  if (args.m <= 8) return launch_fp4<Fp4Shape<1>>(args, launch);
  launch_fp4<Fp4Shape<4>>(args, launch);
}

}  // namespace pykv
