// Rows times an orthonormal Hadamard matrix, in fp32.
//
// A block turns some whole rows in memory that its threads share, whose bandwidth is the limit.  Three of the butterflies' steps
// are done before the elements get there, where rows are whole vectors of eight; up to five more at once, of 32 elements in a
// thread's registers; the factor that is no power of two last, a column of elements in a thread.  Every eighth word is left
// out, which spreads the strides of all steps over the banks.
//
// Many rows of 2^k elements, k from 10 on, have hadacore_packs_kernel, which goes through shared memory less often.
#include <algorithm>

#include "cuda/dependent_shared.cuh"
#include "cuda/device.h"
#include "cuda/vec.cuh"
#include "dequantization/hadacore_transform.h"
#include "dequantization/hadamard.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8192;   // of a block, if its rows are short and many
constexpr int kLog2OfPacks = 10;  // of the shortest rows that hadacore_packs_kernel takes

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
  int done = plan.first_steps ? 3 : 0, end = args.log2;
  // The order of hadacore_packs_kernel, so that a row's bits do not depend on how many there are.
  if (kOrder == 1 && end >= kLog2OfPacks) {
    if (done == 0) {
      butterflies<3>(x, elements, 0);
      done = 3;
      __syncthreads();
    }
    end -= 3;
    butterflies<3>(x, elements, end);
    __syncthreads();
  }
  while (done < end) {
    const int rounds = (end - done + kMostSteps - 1) / kMostSteps, steps = (end - done) / rounds;
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

// Many rows of 2^k elements that lie in whole vectors, k from 10 on (4096 x 4096 in bf16: 50.2 -> 29.9 us).  A thread has eight
// packs of eight elements in registers: it does the three steps within packs and three steps between them; then packs change
// hands in shared memory, and it has others three bits of whose numbers differ.  The numbers' upper bits are those of the first
// packs and middle ones those of the last, so that neighbours in a warp read and write neighbours in memory.
constexpr int kPacks = 8, kMostThreads = 512;

// The pack whose number has k in the three bits from `low` on, and `others` around them.
__device__ inline int pack_of(int others, int low, int k) {
  return (others >> low << (low + 3)) | k << low | (others & ((1 << low) - 1));
}

template <int kBit>
__device__ void step_between(float (&v)[kPacks][8]) {
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if ((k >> kBit & 1) == 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float a = v[k][i], b = v[k + (1 << kBit)][i];
        v[k][i] = a + b;
        v[k + (1 << kBit)][i] = a - b;
      }
    }
}

template <class T, bool kLoads>
__device__ void move_packs(float (&v)[kPacks][8], const HadacoreTransformArgs& args, int64_t row, int others, int low) {
  constexpr int kSize = kPackSize<T> < 8 ? kPackSize<T> : 8;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int at = 8 * pack_of(others, low, k);
#pragma unroll
    for (int part = 0; part < 8; part += kSize) {
      if constexpr (kLoads) {
        const T* const from = static_cast<const T*>(args.input) + args.input_rows.offset(row) + at;
        const auto some = to_floats(load_vec<Vec<T, kSize>>(from + part));
#pragma unroll
        for (int i = 0; i < kSize; ++i) v[k][part + i] = some[i];
      } else {
        Vec<float, kSize> some;
#pragma unroll
        for (int i = 0; i < kSize; ++i) some[i] = v[k][part + i] * args.scale;
        store_vec(static_cast<T*>(args.output) + args.output_rows.offset(row) + at + part, round_to<T>(some));
      }
    }
  }
}
template <bool kLoads>
__device__ void move_packs(float (&v)[kPacks][8], const HadacoreTransformArgs& args, int64_t row, int others, int low) {
  if (args.dtype == DType::kFloat16) return move_packs<half, kLoads>(v, args, row, others, low);
  if (args.dtype == DType::kBFloat16) return move_packs<bf16, kLoads>(v, args, row, others, low);
  return move_packs<float, kLoads>(v, args, row, others, low);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    hadacore_packs_kernel(const __grid_constant__ HadacoreTransformArgs args) {
  extern __shared__ float4 hadacore_packs[];  // the first halves of all packs, and the second ones
  begin_dependent();
  const int rest = args.log2 - 6, row_of_block = threadIdx.x >> rest;  // rest: bits of a pack's number but three
  const int others = threadIdx.x & ((1 << rest) - 1), all = blockDim.x * kPacks;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> rest) + row_of_block;
  const bool there = row < args.num_rows;
  float v[kPacks][8] = {};
  int low = rest;
  if (there) move_packs<true>(v, args, row, others, low);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) butterflies(v[k]);
  step_between<0>(v);
  step_between<1>(v);
  step_between<2>(v);
  float4* const packs = hadacore_packs + (row_of_block << (rest + 3));
  // Packs that lanes have at once lie in different banks, whichever of their numbers' bits differ.
  const auto place = [&](int k) {
    const int n = pack_of(others, low, k);
    return n ^ (n >> 3 & 7);
  };
  for (int done = 0; done < rest;) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float4* const to = packs + place(k);
      to[0] = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
      to[all] = make_float4(v[k][4], v[k][5], v[k][6], v[k][7]);
    }
    __syncthreads();
    low = max(0, min(done, rest - 3));
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const float4* const from = packs + place(k);
      const float4 first = from[0], second = from[all];
      v[k][0] = first.x, v[k][1] = first.y, v[k][2] = first.z, v[k][3] = first.w;
      v[k][4] = second.x, v[k][5] = second.y, v[k][6] = second.z, v[k][7] = second.w;
    }
    const int end = min(low + 3, rest);
    if (done <= low) step_between<0>(v);
    if (done <= low + 1 && low + 1 < end) step_between<1>(v);
    if (low + 2 < end) step_between<2>(v);
    done = end;
  }
  if (there) move_packs<false>(v, args, row, others, low);
}

template <int kOrder>
void launch_kernel(const HadacoreTransformArgs& args, const Launch& launch) {
  const int64_t width = int64_t{kOrder} << args.log2, item = static_cast<int64_t>(size_of(args.dtype));
  const bool vectors = width % 8 == 0 && rows_aligned(16, args.input, args.input_rows, item) &&
                       rows_aligned(16, args.output, args.output_rows, item);
  // Few rows are done sooner by all threads of a block each, and short ones have nothing to gain.
  const int64_t of_row = args.log2 < kLog2OfPacks ? 0 : int64_t{1} << (args.log2 - 6), total = args.num_rows * of_row;
  if (kOrder == 1 && vectors && total > 128 * num_sms(launch.device)) {
    const int64_t threads = std::max<int64_t>(of_row, total > 512 * num_sms(launch.device) ? 128 : 32);
    const int64_t blocks = (total + threads - 1) / threads;
    if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "x: 2^31 blocks of rows in one call are not supported");
    return launch_dependent_shared(hadacore_packs_kernel, static_cast<uint32_t>(blocks), static_cast<unsigned>(threads),
                                   static_cast<size_t>(threads) * kPacks * 8 * sizeof(float), launch,
                                   "hadacore_transform", args);
  }
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
