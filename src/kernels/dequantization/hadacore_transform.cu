// Rows times an orthonormal Hadamard matrix, in fp32.
//
// A block turns some whole rows in memory that its threads share, whose bandwidth is the limit.  Three of the butterflies' steps
// are done before the elements get there, where rows are whole vectors of eight; up to five more at once, of 32 elements in a
// thread's registers; the factor that is no power of two last, a column of elements in a thread.  Every eighth word is left
// out, which spreads the strides of all steps over the banks.
#include <algorithm>

#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/vec.cuh"
#include "dequantization/hadacore_transform.h"
#include "dequantization/hadamard.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8192;  // of a block, if its rows are short and many

struct Plan {
  int32_t rows_per_block;
  bool vectors;      // rows are aligned, and of whole vectors of eight
  bool first_steps;  // those of eight neighbours are done as these are loaded
};

__host__ __device__ constexpr int padded(int i) { return i + i / 8; }

// Steps of elements 1, 2, 4 ... apart.
template <int kSize>
__device__ void butterflies(float (&v)[kSize]) {
#pragma unroll
  for (int s = 1; s < kSize; s *= 2)
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if ((i & s) == 0) {
        const float a = v[i], b = v[i + s];
        v[i] = a + b;
        v[i + s] = a - b;
      }
}

// Steps of elements `step`, 2 `step` ... apart.
template <int kSteps>
__device__ void butterflies(float* x, int elements, int log2_step) {
  constexpr int kSize = 1 << kSteps;
  for (int n = threadIdx.x; n < elements / kSize; n += kThreads) {
    const int low = n & ((1 << log2_step) - 1), first = ((n >> log2_step) << (log2_step + kSteps)) + low;
    float v[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = x[padded(first + (i << log2_step))];
    butterflies(v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[padded(first + (i << log2_step))] = v[i];
  }
}

template <int kMost>
__device__ void butterflies(float* x, int elements, int log2_step, int steps) {
  if constexpr (kMost > 0) {
    if (steps == kMost) return butterflies<kMost>(x, elements, log2_step);
    butterflies<kMost - 1>(x, elements, log2_step, steps);
  }
}

template <int kOrder>
__device__ void multiply(float* x, int elements, int log2) {
  constexpr HadamardSigns<kOrder> kSigns;
  for (int n = threadIdx.x; n < elements / kOrder; n += kThreads) {
    const int row = n >> log2, first = ((row * kOrder) << log2) + (n & ((1 << log2) - 1));
    float v[kOrder];
#pragma unroll
    for (int i = 0; i < kOrder; ++i) v[i] = x[padded(first + (i << log2))];
#pragma unroll
    for (int i = 0; i < kOrder; ++i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kOrder; ++j) sum += kSigns.rows[i] >> j & 1 ? -v[j] : v[j];
      x[padded(first + (i << log2))] = sum;
    }
  }
}

// Calls body(elements of the row before, row, shared place) for each vector of eight, or element.
template <class T, bool kLoads>
__device__ void move_rows(float* x, const HadacoreTransformArgs& args, const Plan& plan, int64_t first_row,
                          int elements, int width) {
  const Rows& rows = kLoads ? args.input_rows : args.output_rows;
  const int size = plan.vectors ? 8 : 1;
  for (int n = threadIdx.x * size; n < elements; n += kThreads * size) {
    const int row = n / width;
    const int64_t at = rows.offset(first_row + row) + (n - row * width);
    const T* from = static_cast<const T*>(args.input) + at;
    T* to = static_cast<T*>(args.output) + at;
    if (!plan.vectors) {
      if constexpr (kLoads) {
        x[padded(n)] = to_float(*from);
      } else {
        *to = from_float<T>(x[padded(n)] * args.scale);
      }
      continue;
    }
    constexpr int kSize = kPackSize<T> < 8 ? kPackSize<T> : 8;
    float all[8];
    if constexpr (!kLoads) {
#pragma unroll
      for (int i = 0; i < 8; ++i) all[i] = x[padded(n) + i] * args.scale;
    }
#pragma unroll
    for (int part = 0; part < 8; part += kSize) {
      Vec<float, kSize> v;
      if constexpr (kLoads) {
        v = to_floats(load_vec<Vec<T, kSize>>(from + part));
#pragma unroll
        for (int i = 0; i < kSize; ++i) all[part + i] = v[i];
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) v[i] = all[part + i];
        store_vec(to + part, round_to<T>(v));
      }
    }
    if constexpr (kLoads) {
      if (plan.first_steps) butterflies(all);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[padded(n) + i] = all[i];
    }
  }
}

template <bool kLoads>
__device__ void move_rows(float* x, const HadacoreTransformArgs& args, const Plan& plan, int64_t first_row,
                          int elements, int width) {
  if (args.dtype == DType::kFloat16) return move_rows<half, kLoads>(x, args, plan, first_row, elements, width);
  if (args.dtype == DType::kBFloat16) return move_rows<bf16, kLoads>(x, args, plan, first_row, elements, width);
  return move_rows<float, kLoads>(x, args, plan, first_row, elements, width);
}

template <int kOrder>
__global__ void __launch_bounds__(kThreads, kOrder < 40 ? 3 : 2)
    hadacore_transform_kernel(const __grid_constant__ HadacoreTransformArgs args, const __grid_constant__ Plan plan) {
  extern __shared__ float hadacore_rows[];
  begin_dependent();
  float* x = hadacore_rows;
  const int width = kOrder << args.log2;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * plan.rows_per_block, left = args.num_rows - first_row;
  const int elements = width * (left < plan.rows_per_block ? static_cast<int>(left) : plan.rows_per_block);
  move_rows<true>(x, args, plan, first_row, elements, width);
  __syncthreads();
  constexpr int kMostSteps = 5;
  for (int done = plan.first_steps ? 3 : 0; done < args.log2;) {
    const int rounds = (args.log2 - done + kMostSteps - 1) / kMostSteps, steps = (args.log2 - done) / rounds;
    butterflies<kMostSteps>(x, elements, done, steps);
    done += steps;
    __syncthreads();
  }
  if constexpr (kOrder > 1) {
    multiply<kOrder>(x, elements, args.log2);
    __syncthreads();
  }
  move_rows<false>(x, args, plan, first_row, elements, width);
}

template <int kOrder>
void launch_kernel(const HadacoreTransformArgs& args, const Launch& launch) {
  const int64_t width = int64_t{kOrder} << args.log2, item = static_cast<int64_t>(size_of(args.dtype));
  const bool vectors = width % 8 == 0 && rows_aligned(16, args.input, args.input_rows, item) &&
                       rows_aligned(16, args.output, args.output_rows, item);
  // Rows of one block share no work: few of them keep all multiprocessors busy.
  const int64_t at_most = args.num_rows / (2 * num_sms(launch.device)), fit = kElements / width;
  const Plan plan{static_cast<int32_t>(std::max<int64_t>(1, std::min(at_most, fit))), vectors,
                  vectors && args.log2 >= 3};
  const int64_t blocks = (args.num_rows + plan.rows_per_block - 1) / plan.rows_per_block;
  if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "x: 2^31 blocks of rows in one call are not supported");
  const auto bytes = static_cast<size_t>(padded(static_cast<int>(plan.rows_per_block * width))) * sizeof(float);
  launch_dependent_shared(hadacore_transform_kernel<kOrder>, static_cast<uint32_t>(blocks), kThreads, bytes, launch,
                          "hadacore_transform", args, plan);
}

}  // namespace

void hadacore_transform_cuda(const HadacoreTransformArgs& args, const Launch& launch) {
  switch (args.order) {
    case 12:
      return launch_kernel<12>(args, launch);
    case 20:
      return launch_kernel<20>(args, launch);
    case 28:
      return launch_kernel<28>(args, launch);
    case 40:
      return launch_kernel<40>(args, launch);
    default:
      return launch_kernel<1>(args, launch);
  }
}

}  // namespace pykv
