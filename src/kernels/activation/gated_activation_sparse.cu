// out = R_T( R_T(gelu(max(gate - cut, 0))) * up ),  cut = mean(gate) + deviations * std(gate) of each row, in fp32.
//
// Memory-bound: the floor is each byte of input and out moved once, so a gate stays in registers between its mean, its
// deviation and its activation, as packs of 16 bytes; gates too wide for that are read three times (kPacks = 0).  The
// mapping follows from the width alone, and the order of additions from the mapping: a row's result depends neither on the
// number of rows nor on their alignment, which only decides how a pack is fetched.
#include "activation/activations.cuh"
#include "activation/gated_activation_sparse.h"
#include "activation/row_tiles.cuh"
#include "cuda/dependent.cuh"
#include "cuda/reduce.cuh"

namespace pykv {
namespace {

template <int kThreadsOfRow>
constexpr int kBlockSize = kThreadsOfRow > 128 ? kThreadsOfRow : 128;

template <class T, bool kAligned>
__device__ Pack<T> load_pack(const T* row, int pack, int width) {
  const int at = pack * kPackSize<T>;
  if constexpr (kAligned) {
    return load_vec<Pack<T>>(row + at);
  } else {
    return load_some<Pack<T>>(row + at, width - at);
  }
}

template <int kThreads>
__device__ float row_sum(float v) {
  if constexpr (kThreads <= 32) {
    return warp_sum<kThreads>(v);
  } else {
    __syncthreads();  // of the sum before
    return block_sum<kThreads>(v);
  }
}

template <class T, int kThreads, int kPacks, bool kAligned, bool kTanh>
__global__ __launch_bounds__(kBlockSize<kThreads>) void gated_activation_sparse_kernel(
    const __grid_constant__ GatedActivationSparseArgs args) {
  constexpr int kRows = kBlockSize<kThreads> / kThreads;
  begin_dependent();
  const int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int width = static_cast<int>(args.width);
  const bool there = row < args.num_rows;  // threads without a row stay: their warp sums with all lanes
  const int packs = there ? (width - 1) / kPackSize<T> + 1 : 0;
  const T* gate = static_cast<const T*>(args.input) + (there ? args.input_rows.offset(row) : 0);
  const T* up = gate + width;
  T* out = static_cast<T*>(args.out) + (there ? args.out_rows.offset(row) : 0);

  Pack<T> kept[kPacks > 0 ? kPacks : 1];
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    if (thread + k * kThreads < packs) kept[k] = load_pack<T, kAligned>(gate, thread + k * kThreads, width);
  // body(pack, what it holds) for all packs of this thread
  const auto each_pack = [&](auto body) {
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k)
        if (thread + k * kThreads < packs) body(thread + k * kThreads, to_floats(kept[k]));
    } else {
      for (int p = thread; p < packs; p += kThreads) body(p, to_floats(load_pack<T, kAligned>(gate, p, width)));
    }
  };
  // A last pack that is not full holds zeros behind the row, which must not count as deviations from the mean.
  const auto size_of_pack = [&](int pack) { return kAligned ? kPackSize<T> : width - pack * kPackSize<T>; };

  float sum = 0.0f;
  each_pack([&](int, const Vec<float, kPackSize<T>>& x) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) sum += x[i];
  });
  const float mean = row_sum<kThreads>(sum) / width;
  float squares = 0.0f;
  each_pack([&](int pack, const Vec<float, kPackSize<T>>& x) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i)
      if (i < size_of_pack(pack)) squares = fmaf(x[i] - mean, x[i] - mean, squares);
  });
  const float cut = fmaf(sqrtf(row_sum<kThreads>(squares) / width), args.deviations, mean);

  each_pack([&](int pack, Vec<float, kPackSize<T>> x) {
    const auto factor = to_floats(load_pack<T, kAligned>(up, pack, width));
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      const float over = x[i] - cut, g = over < 0.0f ? 0.0f : over;  // NaN stays
      x[i] = kTanh ? gelu_tanh(g) : gelu(g);
    }
    x = to_floats(round_to<T>(x));
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) x[i] *= factor[i];
    if constexpr (kAligned) {
      store_vec(out + pack * kPackSize<T>, round_to<T>(x));
    } else {
      store_some(out + pack * kPackSize<T>, round_to<T>(x), width - pack * kPackSize<T>);
    }
  });
}

template <class T, bool kAligned, bool kTanh>
void run(const GatedActivationSparseArgs& args, const Launch& launch) {
  if (args.width > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^31 - 1 elements are not supported");
  const auto start = [&]<int kThreads, int kPacks>() {
    constexpr int kRows = kBlockSize<kThreads> / kThreads;
    const int64_t blocks = (args.num_rows + kRows - 1) / kRows;
    if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
    launch_dependent(gated_activation_sparse_kernel<T, kThreads, kPacks, kAligned, kTanh>,
                     static_cast<unsigned>(blocks), kBlockSize<kThreads>, launch, "gelu_and_mul_sparse", args);
  };
  const int64_t packs = (args.width - 1) / kPackSize<T> + 1;
  if (packs <= 128) {
    start.template operator()<32, 4>();
  } else if (packs <= 1024) {
    start.template operator()<256, 4>();
  } else if (packs <= 2048) {
    start.template operator()<512, 4>();
  } else {
    start.template operator()<1024, 0>();
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
