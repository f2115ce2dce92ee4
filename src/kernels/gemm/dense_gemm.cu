// A block has some columns of out, and its warps take turns at the chunks of k: few rows are bound by reading b, and that takes
// many loads under way.  The sums of the warps are added in order at the end.
//
// Matrices of 16 bits go through mma.m16n8k16, whose first operand are columns: 8 rows of a, not 16, are the least.  A lane has 8
// neighbours of k of each line, and which of them meet in an instruction is the same for both operands.  Where b is fp32,
// lanes have 4 neighbours of k, multiply in fp32 and add up their sums.
#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"
#include "gemm/dense_gemm.h"
#include "gemm/store_as.cuh"

namespace pykv {
namespace {

struct DenseProblem {
  DenseGemmArgs args;
  uint32_t row_tiles;
  bool in_vectors;  // those neighbours that a lane has are aligned, or there are none of them
};

// kCount neighbours of k of a line, zeros where there are none.
template <bool kInVectors, int kCount, class T>
__device__ Vec<T, kCount> load_neighbours(const T* line, int64_t k, int64_t step, int64_t end) {
  Vec<T, kCount> v{};
  if constexpr (kInVectors) {
    if (k < end) v = *reinterpret_cast<const Vec<T, kCount>*>(line + k);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (k + i >= end) continue;
      if constexpr (std::is_same_v<T, float>) {
        v[i] = line[(k + i) * step];
      } else {
        v.words[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(line)[(k + i) * step]} << i % 2 * 16;
      }
    }
  }
  return v;
}

__device__ inline void store_sum(const DenseGemmArgs& args, int64_t row, int64_t column, float x) {
  if (row >= args.m || column >= args.n) return;
  store_as(args.out_dtype, args.out, row * args.out_stride + column, x);
}

// Of 8 kParts columns and 8 kTiles rows; kParts: 1 or 2.
template <class T_, int kParts_, int kTiles_>
struct HalvesShape {
  using A = T_;
  static constexpr bool kIsWide = false;
  static constexpr int kParts = kParts_, kTiles = kTiles_, kWarps = 16, kColumns = 8 * kParts, kRows = 8 * kTiles;
  static constexpr int kEach = 8, kChunk = 4 * kEach;    // of k: of a lane, of a warp
  static constexpr int kTogether = kTiles == 4 ? 2 : 4;  // chunks that a warp loads at once
};

template <class S, bool kInVectors>
__device__ void sum_halves(const DenseProblem& p, int64_t first_row, int64_t first_column, float* sums) {
  using T = typename S::A;
  constexpr int kTogether = kInVectors ? S::kTogether : 1;
  const DenseGemmArgs& args = p.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* columns[S::kParts];
  const T* rows[S::kTiles];
#pragma unroll
  for (int i = 0; i < S::kParts; ++i)
    columns[i] = static_cast<const T*>(args.b) + min(first_column + 8 * i + lane / 4, args.n - 1) * args.b_stride;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
    const int64_t row = first_row + 8 * t + lane / 4;
    rows[t] = row < args.m ? static_cast<const T*>(args.a) + row * args.a_stride : nullptr;
  }
  float sum[S::kTiles][4] = {};
#pragma unroll 1
  for (int64_t first = int64_t{warp} * S::kChunk; first < args.k; first += kTogether * S::kWarps * S::kChunk) {
    Vec<T, 8> b[kTogether][2] = {}, a[kTogether][S::kTiles];
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
      const int64_t k = first + c * S::kWarps * S::kChunk + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < S::kParts; ++i) b[c][i] = load_neighbours<kInVectors, 8>(columns[i], k, args.b_step, args.k);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
        a[c][t] = load_neighbours<kInVectors, 8>(rows[t], k, args.a_step, rows[t] ? args.k : 0);
    }
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
      const auto &low = b[c][0].words, &high = b[c][1].words;
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        const auto& x = a[c][t].words;
#pragma unroll
        for (int i = 0; i < 4; i += 2)
          mma_16x8x16<T>(sum[t], {low[i], high[i], low[i + 1], high[i + 1]}, x[i], x[i + 1]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
    for (int e = 0; e < 2 * S::kParts; ++e)
      sums[(8 * t + lane % 4 * 2 + e % 2) * S::kColumns + e / 2 * 8 + lane / 4] = sum[t][e];
}

// Of kRows rows, where b is fp32.
template <class A_, int kRows_>
struct FloatsShape {
  using A = A_;
  static constexpr bool kIsWide = true;
  static constexpr int kWarps = 8, kColumns = kRows_ == 1 ? 2 : 4, kRows = kRows_;
  static constexpr int kEach = 4;  // of k: of a lane
};

template <class S, bool kInVectors>
__device__ void sum_floats(const DenseProblem& p, int64_t first_row, int64_t first_column, float* sums) {
  using A = typename S::A;
  const DenseGemmArgs& args = p.args;
  const int lane = threadIdx.x % 32;
  const auto b_at = [&](int i) {
    return static_cast<const float*>(args.b) + min(first_column + i, args.n - 1) * args.b_stride;
  };
  const auto a_at = [&](int i) {  // rows from m on are not stored
    return static_cast<const A*>(args.a) + min(first_row + i, args.m - 1) * args.a_stride;
  };
  float sum[S::kRows][S::kColumns] = {};
#pragma unroll(kInVectors ? 2 : 1)
  for (int64_t k = threadIdx.x * S::kEach; k < args.k; k += S::kWarps * 32 * S::kEach) {
    Vec<float, 4> b[S::kColumns];
    Vec<A, 4> a[S::kRows];
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) b[c] = load_neighbours<kInVectors, 4>(b_at(c), k, args.b_step, args.k);
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) a[r] = load_neighbours<kInVectors, 4>(a_at(r), k, args.a_step, args.k);
#pragma unroll
    for (int r = 0; r < S::kRows; ++r) {
      const auto x = to_floats(a[r]);
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c)
#pragma unroll
        for (int i = 0; i < S::kEach; ++i) sum[r][c] = fmaf(x[i], b[c][i], sum[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < S::kRows; ++r)
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      float x = sum[r][c];
#pragma unroll
      for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(~0u, x, half);
      if (lane == 0) sums[r * S::kColumns + c] = x;
    }
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32) dense_gemm_kernel(const __grid_constant__ DenseProblem p) {
  constexpr int kSums = S::kRows * S::kColumns;
  __shared__ float sums[S::kWarps][kSums];
  begin_dependent();
  const int64_t first_row = int64_t{blockIdx.x % p.row_tiles} * S::kRows;
  const int64_t first_column = int64_t{blockIdx.x / p.row_tiles} * S::kColumns;
  const auto sum = [&]<bool kInVectors>() {
    float* const of_warp = sums[threadIdx.x / 32];
    if constexpr (S::kIsWide) {
      sum_floats<S, kInVectors>(p, first_row, first_column, of_warp);
    } else {
      sum_halves<S, kInVectors>(p, first_row, first_column, of_warp);
    }
  };
  if (p.in_vectors) {
    sum.template operator()<true>();
  } else {
    sum.template operator()<false>();
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kSums; i += S::kWarps * 32) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) total += sums[w][i];
    store_sum(p.args, first_row + i / S::kColumns, first_column + i % S::kColumns, total);
  }
}

template <class S>
void launch_shape(const DenseGemmArgs& args, const Launch& launch) {
  const int64_t row_tiles = (args.m + S::kRows - 1) / S::kRows;
  const int64_t blocks = (args.n + S::kColumns - 1) / S::kColumns * row_tiles;
  if (blocks > INT32_MAX)
    fail(PYKV_VALUE_ERROR, "output: has too many elements: %lld rows of %lld", static_cast<long long>(args.m),
         static_cast<long long>(args.n));
  const auto a_size = static_cast<int64_t>(size_of(args.a_dtype)), b_size = static_cast<int64_t>(size_of(args.b_dtype));
  const bool in_vectors = args.a_step == 1 && args.b_step == 1 && args.k % S::kEach == 0 &&
                          is_aligned(16, args.a, {args.a_stride * a_size}) &&
                          is_aligned(16, args.b, {args.b_stride * b_size});
  launch_dependent(dense_gemm_kernel<S>, dim3(static_cast<unsigned>(blocks)), dim3(S::kWarps * 32), launch,
                   "dense_gemm", DenseProblem{args, static_cast<uint32_t>(row_tiles), in_vectors});
}

}  // namespace

void dense_gemm_cuda(const DenseGemmArgs& args, const Launch& launch) {
  if (args.b_dtype == DType::kFloat32)
    return dispatch<half, bf16, float>(args.a_dtype, [&]<class A>() {
      if (args.m == 1) return launch_shape<FloatsShape<A, 1>>(args, launch);
      launch_shape<FloatsShape<A, 8>>(args, launch);
    });
  dispatch<half, bf16>(args.a_dtype, [&]<class T>() {
    const int64_t blocks = (args.n + 15) / 16 * ((args.m + 31) / 32);
    if (blocks * 2 <= num_sms(launch.device)) {  // few: smaller ones read b faster
      if (args.m <= 8) return launch_shape<HalvesShape<T, 1, 1>>(args, launch);
      return launch_shape<HalvesShape<T, 1, 2>>(args, launch);
    }
    if (args.m <= 8) return launch_shape<HalvesShape<T, 2, 1>>(args, launch);
    if (args.m <= 16) return launch_shape<HalvesShape<T, 2, 2>>(args, launch);
    launch_shape<HalvesShape<T, 2, 4>>(args, launch);
  });
}

}  // namespace pykv
