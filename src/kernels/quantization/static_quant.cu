// codes = code(x * (1 / scale)), or code(x / scale), or code(x * (1 / scale)) + zero point; scale given, or from the largest
// magnitude of all numbers.
//
// Memory-bound: the floor is each byte of input and codes moved once, and once more of the input where the largest is to be
// found.  A thread takes kVectors packs, all loads under way before the first is used; neighbours in a warp are neighbours in a
// row.  The second reading goes from the end, where the first one has left what the second-level cache holds.
#include <algorithm>
#include <cfloat>

#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/largest.cuh"
#include "cuda/quantise.cuh"
#include "cuda/quotient.cuh"
#include "cuda/reduce.cuh"
#include "quantization/packs.cuh"
#include "quantization/static_quant.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kVectors = 4;

struct Plan {
  Divider packs, group_rows, group_columns;  // packs: of a row
  uint32_t total;
  bool aligned, one_scale, backwards;  // one_scale: for all of a pack
};

// A pack: row, column, and where it is.
template <class T>
struct Part {
  uint32_t row;
  int64_t column, count;
  const T* from;

  __device__ Part(const StaticQuantArgs& args, const Plan& plan, uint32_t n) {
    uint32_t pack;
    row = plan.packs(n, pack);
    column = int64_t{pack} * kPackSize<T>;
    count = min(args.width - column, int64_t{kPackSize<T>});
    from = static_cast<const T*>(args.input) + args.input_rows.offset(row) + column;
  }
};

struct Factor {
  float scale, inverse;
  bool odd;

  __device__ Factor(const StaticQuantArgs& args, float given) {
    scale = given;
    inverse = args.from_largest ? factor_of(given) : 1.0f / given;
    odd = !(inverse > 0.0f && inverse <= FLT_MAX);
  }
};

template <class T>
__device__ Vec<uint8_t, kPackSize<T>> shifted_codes(const Pack<T>& x, float inverse, int zero_point) {
  auto v = to_floats(x);
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) {
    const int64_t sum = int64_t{__float2int_rn(__fmul_rn(v[i], inverse))} + zero_point;
    v[i] = static_cast<float>(max(min(sum, int64_t{127}), int64_t{-128}));
  }
  return quantise<DType::kInt8>(v);
}

template <class T>
__global__ __launch_bounds__(kThreads) void static_quant_kernel(const __grid_constant__ StaticQuantArgs args,
                                                                const __grid_constant__ Plan plan) {
  constexpr int kSize = kPackSize<T>;
  const uint32_t block = plan.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t first = block * (kThreads * kVectors) + threadIdx.x;
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (const uint32_t n = first + k * kThreads; n < plan.total) prefetch(Part<T>(args, plan, n).from);
  }
  begin_dependent();

  Pack<T> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const uint32_t n = first + k * kThreads;
    if (n >= plan.total) break;
    const Part<T> part(args, plan, n);
    x[k] = load_pack(part.from, part.count, plan.aligned);
  }
  const float number = args.from_largest ? *args.scale_out : args.scales ? 1.0f : float{args.number};
  const int zero_point = args.zero_point ? *args.zero_point : args.zero;
  Factor factor(args, number);
  Quotient quotient;
  if (args.divides) quotient = Quotient(number);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const uint32_t n = first + k * kThreads;
    if (n >= plan.total) break;
    const Part<T> part(args, plan, n);
    Vec<uint8_t, kSize> codes;
    const int64_t group_row = args.scales ? plan.group_rows.quotient(static_cast<int>(part.row)) * args.scale_row : 0;
    const auto scale_of = [&](int64_t column) {
      return args.scales[group_row + plan.group_columns.quotient(static_cast<int>(column)) * args.scale_column];
    };
    if (args.divides) {
      auto v = to_floats(x[k]);
      quotient.divide<T>(v.elements);
      codes = quantise<DType::kInt8>(v);
    } else if (args.shifted) {
      codes = shifted_codes<T>(x[k], factor.inverse, zero_point);
    } else if (plan.one_scale) {
      if (args.scales) factor = Factor(args, scale_of(part.column));
      codes = codes_times(args.codes, x[k], factor.inverse, factor.odd);
    } else {
      auto v = to_floats(x[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i)
        if (i < part.count) v[i] *= 1.0f / scale_of(part.column + i);
      codes = args.codes == CodeKind::kE4M3 ? quantise<DType::kFloat8E4M3>(v) : quantise<DType::kFloat8E5M2>(v);
    }
    uint8_t* const to = static_cast<uint8_t*>(args.out) + args.out_rows.offset(part.row) + part.column;
    store_codes(to, codes, part.count, plan.aligned);
  }
}

__global__ void clear_scale_kernel(float* scale) {
  begin_dependent();
  *scale = 0.0f;
}

// The largest magnitude, through the largest code, of as many blocks as there are, of all of which the largest is left in `scale`.
template <class T>
__global__ __launch_bounds__(kThreads) void largest_kernel(const __grid_constant__ StaticQuantArgs args,
                                                           const __grid_constant__ Plan plan) {
  begin_dependent();
  const uint32_t step = gridDim.x * (kThreads * kVectors);
  float most = 0.0f;
  for (uint32_t base = blockIdx.x * (kThreads * kVectors) + threadIdx.x; base < plan.total; base += step) {
    Pack<T> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      x[k] = {};
      const uint32_t n = base + k * kThreads;
      if (n >= plan.total) continue;
      const Part<T> part(args, plan, n);
      x[k] = load_pack(part.from, part.count, plan.aligned);
    }
    most = fmaxf(most, largest_of(x));
  }
  most = block_reduce<0>(most, kThreads / 32, Maximum()) / largest_code(args.codes);
  if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(args.scale_out), __float_as_int(most));
}

template <class T>
void run(const StaticQuantArgs& args, const Launch& launch) {
  constexpr int64_t kItem = sizeof(T), kSize = kPackSize<T>, kTile = kThreads * kVectors;
  const int64_t packs = (args.width + kSize - 1) / kSize;
  if (args.width > INT32_MAX - kSize || packs > (INT32_MAX - kTile) / args.rows)
    fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 vectors of %d elements in one call are not supported",
         static_cast<int>(kSize));
  const int64_t total = packs * args.rows;
  Plan plan{
      Divider(packs),
      Divider(args.group_rows),
      Divider(args.group_columns),
      static_cast<uint32_t>(total),
      rows_aligned(kAccessBytes, args.input, args.input_rows, kItem) && rows_aligned(kSize, args.out, args.out_rows, 1),
      !args.scales || args.group_columns % kSize == 0 || args.group_columns >= args.width,
      false};
  const auto blocks = static_cast<unsigned>((total + kTile - 1) / kTile);
  if (args.from_largest) {
    launch_dependent(clear_scale_kernel, 1, 1, launch, "largest", args.scale_out);
    launch_dependent(largest_kernel<T>, std::min(blocks, 8u * static_cast<unsigned>(num_sms(launch.device))), kThreads,
                     launch, "largest", args, plan);
    plan.backwards = true;
  }
  launch_dependent(static_quant_kernel<T>, blocks, kThreads, launch, "static_quant", args, plan);
}

}  // namespace

void static_quant_cuda(const StaticQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() { run<T>(args, launch); });
}

}  // namespace pykv
