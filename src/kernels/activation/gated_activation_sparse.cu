// out = R_T( R_T(gelu(max(gate - cut, 0))) * up ),  cut = mean(gate) + deviations * std(gate) of each row, in fp32.
//
// Memory-bound: the floor is each byte of input and out moved once, so a gate stays in registers between its mean, its
// deviation and its activation, as packs of 16 bytes, and its factors come beside it; gates too wide for that are read three
// times (kPacks = 0).  The mapping follows from the width alone, and the order of additions from the mapping: a row's result
// depends neither on the number of rows nor on their alignment, which only decides how a pack is fetched.
#include <bit>

#include "activation/activations.cuh"
#include "activation/gated_activation_sparse.h"
#include "activation/row_tiles.cuh"
#include "cuda/dependent.cuh"
#include "cuda/pairs.cuh"
#include "cuda/reduce.cuh"

namespace pykv {
namespace {

constexpr int kRows = 4;  // of a block where a warp has one

template <class T, bool kAligned>
__device__ Pack<T> load_pack(const T* row, int pack, int width) {
  const int at = pack * kPackSize<T>;
  if constexpr (kAligned) {
    return load_vec_in_order<Pack<T>>(row + at);
  } else {
    return load_some<Pack<T>>(row + at, width - at);
  }
}

// max(x, 0), NaN staying.
__device__ float not_below_zero(float x) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
#else
  return x < 0.0f ? 0.0f : x;
#endif
}

// x * Phi(x), Phi the normal distribution, of x >= 0, rounded to T later.  By erfc(z) / 2, z = x / sqrt(2), as in erfc.h.
template <class T>
__device__ float gelu_above_zero(float x) {
  const float t = reciprocal(fmaf(x, 0.35355339f, 1.0f)), s = x * 0.84932180f;
  const float tail = t * (sizeof(T) < 4 ? rough_erfc_factor(t) : erfc_factor(t)) * power_of_2(-s * s);
  return x * (1.0f - tail);
}

// A row belongs to a block, or to one of its warps.  kPacks: of a thread.
template <class T, bool kWarp, int kPacks, bool kAligned, bool kTanh>
__global__ __launch_bounds__(kPacks == 0 ? 1024 : 512) void gated_activation_sparse_kernel(
    const __grid_constant__ GatedActivationSparseArgs args) {
  const int threads = kWarp ? 32 : blockDim.x, thread = threadIdx.x & (threads - 1);
  const int64_t row = kWarp ? blockIdx.x * int64_t{kRows} + threadIdx.x / 32 : blockIdx.x;
  const int width = static_cast<int>(args.width);
  const bool there = row < args.num_rows;  // threads without a row stay: their warp sums with all lanes
  const int packs = there ? (width - 1) / kPackSize<T> + 1 : 0;
  const T* gate = static_cast<const T*>(args.input) + (there ? args.input_rows.offset(row) : 0);
  const T* up = gate + width;
  T* out = static_cast<T*>(args.out) + (there ? args.out_rows.offset(row) : 0);
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (thread + k * threads < packs) {
        prefetch(gate + (thread + k * threads) * kPackSize<T>);
        prefetch(up + (thread + k * threads) * kPackSize<T>);
      }
  }
  have_ready(out);
  begin_dependent();

  Pack<T> kept[kPacks > 0 ? kPacks : 1], factors[kPacks > 0 ? kPacks : 1];
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (thread + k * threads < packs) kept[k] = load_pack<T, kAligned>(gate, thread + k * threads, width);
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (thread + k * threads < packs) factors[k] = load_pack<T, kAligned>(up, thread + k * threads, width);
  const auto row_sum = [&]<int kUse>(float v) {
    return kWarp ? warp_sum<32>(v) : block_reduce<kUse>(v, threads / 32, Sum());
  };
  // body(pack, its gates, what gives its factors) for all packs of this thread
  const auto each_pack = [&](auto body) {
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        if (thread + k * threads < packs) body(thread + k * threads, to_floats(kept[k]), [&] { return factors[k]; });
    } else {
      for (int p = thread; p < packs; p += threads)
        body(p, to_floats(load_pack<T, kAligned>(gate, p, width)),
             [&] { return load_pack<T, kAligned>(up, p, width); });
    }
  };
  // A last pack that is not full holds zeros behind the row, which must not count as deviations from the mean.
  const auto size_of_pack = [&](int pack) { return kAligned ? kPackSize<T> : width - pack * kPackSize<T>; };

  float sum = 0.0f;
  each_pack([&](int, const Vec<float, kPackSize<T>>& x, auto) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) sum += x[i];
  });
  const float mean = row_sum.template operator()<0>(sum) / width;
  float squares = 0.0f;
  each_pack([&](int pack, const Vec<float, kPackSize<T>>& x, auto) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i)
      if (i < size_of_pack(pack)) squares = fmaf(x[i] - mean, x[i] - mean, squares);
  });
  const float cut = fmaf(sqrtf(row_sum.template operator()<1>(squares) / width), args.deviations, mean);

  each_pack([&](int pack, Vec<float, kPackSize<T>> x, auto factors_of) {
    const auto factor = factors_of();
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      const float g = not_below_zero(x[i] - cut);
      x[i] = kTanh ? quick_gelu_tanh(g) : gelu_above_zero<T>(g);
    }
    auto y = round_to<T>(x);
    if constexpr (kInWords<T, kPackSize<T>>) {
#pragma unroll
      for (int i = 0; i < kPackSize<T> / 2; ++i) y.words[i] = multiply_pairs<T>(y.words[i], factor.words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPackSize<T>; ++i) y[i] *= factor[i];
    }
    if constexpr (kAligned) {
      store_vec(out + pack * kPackSize<T>, y);
    } else {
      store_some(out + pack * kPackSize<T>, y, width - pack * kPackSize<T>);
    }
  });
}

template <class T, bool kAligned, bool kTanh>
void run(const GatedActivationSparseArgs& args, const Launch& launch) {
  if (args.width > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^31 - 1 elements are not supported");
  const auto start = [&]<bool kWarp, int kPacks>(int threads) {
    const int64_t blocks = kWarp ? (args.num_rows + kRows - 1) / kRows : args.num_rows;
    if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
    launch_dependent(gated_activation_sparse_kernel<T, kWarp, kPacks, kAligned, kTanh>, static_cast<unsigned>(blocks),
                     threads, launch, "gelu_and_mul_sparse", args);
  };
  constexpr int kPacks = 4;
  const int64_t threads = ((args.width - 1) / kPackSize<T> + kPacks) / kPacks;
  if (threads <= 32) {
    start.template operator()<true, kPacks>(32 * kRows);
  } else if (threads <= 512) {
    start.template operator()<false, kPacks>(static_cast<int>(std::bit_ceil(static_cast<uint64_t>(threads))));
  } else {
    start.template operator()<false, 0>(1024);
  }
}

}  // namespace

void gated_activation_sparse_cuda(const GatedActivationSparseArgs& args, const Launch& launch) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  const bool aligned = rows_aligned(kAccessBytes, args.input, args.input_rows, size) &&
                       rows_aligned(kAccessBytes, args.out, args.out_rows, size) &&
                       args.width * size % kAccessBytes == 0;
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    dispatch_bool(aligned, [&]<bool kAligned>() {
      dispatch_bool(args.tanh, [&]<bool kTanh>() { run<T, kAligned, kTanh>(args, launch); });
    });
  });
}

}  // namespace pykv
