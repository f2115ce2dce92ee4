// A warp takes two rows of b and eight of a: its lanes have eighths of each 256 elements of k, multiply in fp32, and add up their
// sums at the end.  Bound by reading b; the rows of a come from the L1, for the warps of a block take the same.
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "gemm/dense_gemm.h"

namespace pykv {
namespace {

constexpr int kWarps = 4, kEach = 8, kRows = 8, kColumns = 2;  // kEach: neighbours of k

struct DenseProblem {
  DenseGemmArgs args;
  uint32_t row_tiles;
  bool in_vectors;  // neighbours are aligned
};

// Elements of a row from k on, of which there are `count`.
template <class T>
__device__ void load_neighbours(float (&to)[kEach], const T* row, int64_t k, int64_t step, int count, bool in_vectors) {
  if (in_vectors && count >= kEach) {
    constexpr int kSize = kPackSize<T> < kEach ? kPackSize<T> : kEach;
#pragma unroll
    for (int i = 0; i < kEach; i += kSize) {
      const auto v = to_floats(*reinterpret_cast<const Vec<T, kSize>*>(row + k + i));
#pragma unroll
      for (int j = 0; j < kSize; ++j) to[i + j] = v[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) to[i] = i < count ? to_float(row[(k + i) * step]) : 0.0f;
}

template <class A, class B>
__global__ void __launch_bounds__(kWarps * 32) dense_gemm_kernel(const __grid_constant__ DenseProblem p) {
  begin_dependent();
  const DenseGemmArgs& args = p.args;
  const int lane = threadIdx.x % 32;
  const int64_t first_row = int64_t{blockIdx.x % p.row_tiles} * kRows;
  const int64_t first_column = (int64_t{blockIdx.x / p.row_tiles} * kWarps + threadIdx.x / 32) * kColumns;
  if (first_column >= args.n) return;
  float sum[kColumns][kRows] = {};
#pragma unroll 1
  for (int64_t k = lane * kEach; k < args.k; k += 32 * kEach) {
    const int count = static_cast<int>(min(int64_t{kEach}, args.k - k));
    float b[kColumns][kEach];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int64_t column = min(first_column + c, args.n - 1);
      load_neighbours(b[c], static_cast<const B*>(args.b) + column * args.b_stride, k, args.b_step, count,
                      p.in_vectors);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first_row + r >= args.m) break;
      float a[kEach];
      load_neighbours(a, static_cast<const A*>(args.a) + (first_row + r) * args.a_stride, k, args.a_step, count,
                      p.in_vectors);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum[c][r] = fmaf(a[i], b[c][i], sum[c][r]);
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x = sum[c][r];
#pragma unroll
      for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(~0u, x, half);
      const int64_t row = first_row + r, column = first_column + c;
      if (lane != 0 || row >= args.m || column >= args.n) continue;
      const int64_t at = row * args.out_stride + column;
      if (args.out_dtype == DType::kBFloat16)
        static_cast<bf16*>(args.out)[at] = from_float<bf16>(x);
      else if (args.out_dtype == DType::kFloat16)
        static_cast<half*>(args.out)[at] = from_float<half>(x);
      else
        static_cast<float*>(args.out)[at] = x;
    }
}

}  // namespace

void dense_gemm_cuda(const DenseGemmArgs& args, const Launch& launch) {
  const int64_t row_tiles = (args.m + kRows - 1) / kRows;
  const int64_t blocks = (args.n + kWarps * kColumns - 1) / (kWarps * kColumns) * row_tiles;
  if (blocks > INT32_MAX)
    fail(PYKV_VALUE_ERROR, "output: has too many elements: %lld rows of %lld", static_cast<long long>(args.m),
         static_cast<long long>(args.n));
  const auto a_size = static_cast<int64_t>(size_of(args.a_dtype)), b_size = static_cast<int64_t>(size_of(args.b_dtype));
  const bool in_vectors = args.a_step == 1 && args.b_step == 1 && is_aligned(16, args.a, {args.a_stride * a_size}) &&
                          is_aligned(16, args.b, {args.b_stride * b_size});
  const DenseProblem p{args, static_cast<uint32_t>(row_tiles), in_vectors};
  dispatch<half, bf16, float>(args.a_dtype, [&]<class A>() {
    const auto kernel = args.b_dtype == DType::kFloat32 ? dense_gemm_kernel<A, float> : dense_gemm_kernel<A, A>;
    launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32), launch, "dense_gemm", p);
  });
}

}  // namespace pykv
