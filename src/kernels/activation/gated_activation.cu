// result = R_T( R_T(activation(gate)) * up ), the activation in fp32.
//
// Memory-bound: the floor is each byte of input and result moved once.  A block takes blockDim.y rows, threads side by
// side along a row, each with kVectors vectors of kSize elements of both halves, all loaded before the first is used.
// The activation costs some 20 instructions an element, half of what the chip can issue while memory delivers one.
#include "activation/gated_activation.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

// x / (1 + exp(-x)) within 3 units in the last place; -inf gives NaN, as the formula does.
struct Silu {
  __device__ float operator()(float x) const {
    float reciprocal;
    asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + expf(-x)));
    return x * reciprocal;
  }
};

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
  __device__ float operator()(float x) const {
    const float twice_u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + expf(-twice_u));
  }
};

constexpr int kThreads = 256;

template <class T, class Activation, int kSize, int kVectors>
__global__ __launch_bounds__(kThreads) void gated_activation_kernel(const __grid_constant__ GatedActivationArgs args,
                                                                    unsigned tiles) {
  using V = Vec<T, kSize>;
  const int64_t row = int64_t{blockIdx.x / tiles} * blockDim.y + threadIdx.y;
  if (row >= args.num_rows) return;
  const int64_t first = (int64_t{blockIdx.x % tiles} * (blockDim.x * kVectors) + threadIdx.x) * kSize;
  const int step = blockDim.x * kSize;
  const T* gate = static_cast<const T*>(args.input) + args.input_rows.offset(row) + first;
  const T* up = gate + args.width;
  T* result = static_cast<T*>(args.result) + args.result_rows.offset(row) + first;

  V a[kVectors], b[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (first + k * step < args.width) {
      a[k] = load_vec_streamed<V>(gate + k * step);
      b[k] = load_vec_streamed<V>(up + k * step);
    }
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (first + k * step < args.width) {
      auto x = to_floats(a[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = Activation()(x[i]);
      x = to_floats(round_to<T>(x));
      const auto y = to_floats(b[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= y[i];
      store_vec(result + k * step, round_to<T>(x));
    }
}

template <class T, class Activation, int kSize>
void run(const GatedActivationArgs& args, const Launch& launch) {
  const int64_t vectors = args.width / kSize;  // of a row
  const auto start = [&]<int kVectors>(int threads) {
    const int64_t wanted = (vectors + kVectors - 1) / kVectors;
    dim3 block(1);
    while (block.x < wanted && static_cast<int>(block.x) < threads) block.x *= 2;
    block.y = threads / block.x;
    const int64_t tiles = (wanted + block.x - 1) / block.x, row_groups = (args.num_rows + block.y - 1) / block.y;
    if (tiles * row_groups > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "input: too large, more than 2^31 - 1 tiles");
    gated_activation_kernel<T, Activation, kSize, kVectors>
        <<<static_cast<unsigned>(tiles * row_groups), block, 0, stream_of(launch)>>>(args,
                                                                                     static_cast<unsigned>(tiles));
  };
  // What does not fill the chip is spread over as much of it as possible.
  if (vectors * args.num_rows > int64_t{num_sms(launch.device)} * 1024) {
    start.template operator()<2>(kThreads);
  } else {
    start.template operator()<1>(kThreads / 2);
  }
}

// The widest vectors that are aligned in every row of both arrays, and divide a row.
template <class Activation>
void run_in_vectors(const GatedActivationArgs& args, const Launch& launch) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  const auto aligned = [&](int64_t bytes) {
    const Rows &in = args.input_rows, &out = args.result_rows;
    return is_aligned(bytes, args.input,
                      {in.stride0 * size, in.stride1 * size, in.stride2 * size, args.width * size}) &&
           is_aligned(bytes, args.result, {out.stride0 * size, out.stride1 * size, out.stride2 * size});
  };
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    if (aligned(kAccessBytes)) {
      run<T, Activation, kPackSize<T>>(args, launch);
    } else if (aligned(2 * sizeof(T))) {
      run<T, Activation, 2>(args, launch);
    } else {
      run<T, Activation, 1>(args, launch);
    }
  });
}

}  // namespace

void silu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<Silu>(args, launch);
  check_launch("silu_and_mul");
}

void gelu_tanh_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<GeluTanh>(args, launch);
  check_launch("gelu_tanh_and_mul");
}

}  // namespace pykv
