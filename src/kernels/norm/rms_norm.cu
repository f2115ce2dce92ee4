// out = z * r * w,  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon),  z = input or R_T(input + residual).
//
// Memory-bound.  The floor is each byte of input, out (and residual, twice) moved once, so a row stays in registers
// between the sum and the product.  A row belongs to kThreads threads (part of a warp up to a whole block) as packs of
// 16 bytes, kPacks a thread, all loaded before the first is used, together with the weight (while registers last): a
// call that is too small to fill the chip waits for memory once.  Rows too wide for registers are read twice (kPacks =
// 0).
//
// The mapping follows from hidden_size alone, and who adds what in which order from the mapping: a row's result depends
// neither on the number of rows nor on their alignment, which only decides how a pack is fetched.
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "norm/rms_norm.h"

namespace pykv {
namespace {

// One row of an array, in packs.  Unaligned, or with a last pack that is not full, element by element.
template <class T, bool kAligned>
struct Row {
  T* data;
  int size;

  __device__ Pack<T> load_streamed(int pack) const {
    if constexpr (kAligned) {
      return load_vec_streamed<Pack<T>>(data + pack * kPackSize<T>);
    } else {
      return load(pack);
    }
  }
  __device__ Pack<T> load(int pack) const {
    const int at = pack * kPackSize<T>;
    if constexpr (kAligned) {
      return load_vec<Pack<T>>(data + at);
    } else {
      return load_some(data + at, size - at);
    }
  }
  __device__ void store(int pack, const Pack<T>& v) const {
    const int at = pack * kPackSize<T>;
    if constexpr (kAligned) {
      store_vec(data + at, v);
    } else {
      store_some(data + at, v, size - at);
    }
  }
};

template <class T>
__device__ Pack<T> add(const Pack<T>& a, const Pack<T>& b) {
  auto sum = to_floats(a);
  const auto other = to_floats(b);
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) sum[i] += other[i];
  return round_to<T>(sum);
}

template <class T>
__device__ float sum_of_squares(const Pack<T>& v) {
  const auto floats = to_floats(v);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) sum = fmaf(floats[i], floats[i], sum);
  return sum;
}

template <class T>
__device__ Pack<T> scale(const Pack<T>& z, float r, const Pack<T>& weight) {
  auto floats = to_floats(z);
  const auto w = to_floats(weight);
#pragma unroll
  for (int i = 0; i < kPackSize<T>; ++i) floats[i] = floats[i] * r * w[i];
  return round_to<T>(floats);
}

template <int kThreads>
__device__ float row_sum(float v) {
  if constexpr (kThreads <= 32) {
    return warp_sum<kThreads>(v);
  } else {
    return block_sum<kThreads>(v);
  }
}

template <class T>
__host__ __device__ int packs_of(int hidden_size) {
  return (hidden_size - 1) / kPackSize<T> + 1;
}

constexpr int block_size(int threads_per_row) { return threads_per_row > 128 ? threads_per_row : 128; }

template <class T, int kThreads, int kPacks, bool kAligned, bool kResidual>
__global__ __launch_bounds__(block_size(kThreads)) void rms_norm_kernel(const __grid_constant__ RmsNormArgs args,
                                                                        float inverse_size) {
  constexpr int kRows = block_size(kThreads) / kThreads;
  const int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int hidden_size = static_cast<int>(args.hidden_size);
  const bool there = row < args.num_rows;  // threads without a row stay: their warp sums with all lanes
  const int packs = there ? packs_of<T>(hidden_size) : 0;

  const auto row_at = [&](const void* data, const Rows& rows) {
    const int64_t offset = there ? rows.offset(row) : 0;
    return Row<T, kAligned>{static_cast<T*>(const_cast<void*>(data)) + offset, hidden_size};
  };
  const Row<T, kAligned> weight{static_cast<T*>(const_cast<void*>(args.weight)), hidden_size};
  const auto rsqrt_mean = [&](float sum) { return rsqrtf(fmaf(row_sum<kThreads>(sum), inverse_size, args.epsilon)); };
  constexpr Pack<T> kNothing{};

  if constexpr (kPacks > 0) {
    constexpr bool kWeightEarly = kThreads <= 256;
    Pack<T> z[kPacks], added[kPacks], w[kPacks];
    const auto load_weight = [&](int k) {
      w[k] = filled<T, kPackSize<T>>(1.0f);
      if (args.weight && thread + k * kThreads < packs) w[k] = weight.load(thread + k * kThreads);
    };

    const auto input = row_at(args.input, args.input_rows);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      z[k] = kNothing;
      if (thread + k * kThreads < packs) z[k] = input.load_streamed(thread + k * kThreads);
    }
    [[maybe_unused]] Row<T, kAligned> residual;
    if constexpr (kResidual) {
      residual = row_at(args.residual, args.residual_rows);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        added[k] = kNothing;
        if (thread + k * kThreads < packs) added[k] = residual.load_streamed(thread + k * kThreads);
      }
    }
    if constexpr (kWeightEarly) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) load_weight(k);
    }

    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (kResidual) {
        z[k] = add(z[k], added[k]);
        if (thread + k * kThreads < packs) residual.store(thread + k * kThreads, z[k]);
      }
      sum += sum_of_squares(z[k]);
    }
    const float r = rsqrt_mean(sum);
    const auto out = row_at(args.out, args.out_rows);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (!kWeightEarly) load_weight(k);
      if (thread + k * kThreads < packs) out.store(thread + k * kThreads, scale(z[k], r, w[k]));
    }
  } else {
    const auto input = row_at(args.input, args.input_rows);
    const auto residual = kResidual ? row_at(args.residual, args.residual_rows) : input;
    float sum = 0.0f;
#pragma unroll 4
    for (int p = thread; p < packs; p += kThreads) {
      Pack<T> z = input.load(p);
      if constexpr (kResidual) {
        z = add(z, residual.load(p));
        residual.store(p, z);
      }
      sum += sum_of_squares(z);
    }
    const float r = rsqrt_mean(sum);
    const auto z = kResidual ? residual : input;  // each thread reads what it has written itself
    const auto out = row_at(args.out, args.out_rows);
#pragma unroll 2
    for (int p = thread; p < packs; p += kThreads)
      out.store(p, scale(z.load(p), r, args.weight ? weight.load(p) : filled<T, kPackSize<T>>(1.0f)));
  }
}

template <class T, bool kAligned, bool kResidual>
void run(const RmsNormArgs& args, cudaStream_t stream) {
  if (args.hidden_size > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^31 - 1 elements are not supported");
  const auto launch = [&]<int kThreads, int kPacks>() {
    constexpr int kRows = block_size(kThreads) / kThreads;
    const int64_t blocks = (args.num_rows + kRows - 1) / kRows;
    if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
    rms_norm_kernel<T, kThreads, kPacks, kAligned, kResidual>
        <<<static_cast<unsigned>(blocks), block_size(kThreads), 0, stream>>>(
            args, 1.0f / static_cast<float>(args.hidden_size));
  };
  const int packs = packs_of<T>(static_cast<int>(args.hidden_size));
  if (packs <= 16) {
    launch.template operator()<16, 1>();
  } else if (packs <= 32) {
    launch.template operator()<32, 1>();
  } else if (packs <= 128) {
    launch.template operator()<32, 4>();
  } else if (packs <= 512) {
    launch.template operator()<256, 2>();
  } else if (packs <= 1024) {
    launch.template operator()<256, 4>();
  } else if (packs <= 2048) {
    launch.template operator()<512, 4>();
  } else if (sizeof(T) == 4 && packs <= 4096) {
    launch.template operator()<1024, sizeof(T) == 4 ? 4 : 0>();
  } else {
    launch.template operator()<1024, 0>();
  }
}

// Whether every row of every array can be moved in whole, aligned packs.
bool in_packs(const RmsNormArgs& args) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  const auto aligned = [&](const void* data, const Rows& rows) {
    return is_aligned(kAccessBytes, data, {rows.stride0 * size, rows.stride1 * size, rows.stride2 * size});
  };
  return aligned(args.input, args.input_rows) && aligned(args.out, args.out_rows) &&
         aligned(args.residual, args.residual_rows) && is_aligned(kAccessBytes, args.weight, {args.hidden_size * size});
}

}  // namespace

void rms_norm_cuda(const RmsNormArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    dispatch_bool(in_packs(args), [&]<bool kAligned>() {
      dispatch_bool(args.residual != nullptr,
                    [&]<bool kResidual>() { run<T, kAligned, kResidual>(args, stream_of(launch)); });
    });
  });
  check_launch("rms_norm");
}

}  // namespace pykv
