// out = R_T(activation(input)), in fp32.
//
// Memory-bound: the floor is each byte of input and out moved once.  All vectors of a thread are loaded before the first
// is used (row_tiles.cuh says which).
#include "activation/activations.cuh"
#include "activation/elementwise_activation.h"
#include "activation/row_tiles.cuh"

namespace pykv {
namespace {

struct GeluTanh {
  __device__ explicit GeluTanh(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return gelu_tanh(x); }
};

struct GeluQuick {
  __device__ explicit GeluQuick(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return x * sigmoid(1.702f * x); }
};

struct Relu2 {
  __device__ explicit Relu2(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return x <= 0.0f ? 0.0f : x * x; }  // NaN stays
};

struct Xielu {
  float alpha_p, alpha_n, beta, eps;
  __device__ explicit Xielu(const ElementwiseActivationArgs& args)
      : alpha_p(softplus(args.alpha_p)), alpha_n(args.beta + softplus(args.alpha_n)), beta(args.beta), eps(args.eps) {}
  __device__ static float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
  __device__ float operator()(float x) const {
    const float curve = x > 0.0f ? alpha_p * x * x : (expm1f(eps < x ? eps : x) - x) * alpha_n;  // NaN stays
    return fmaf(beta, x, curve);
  }
};

template <class T, class Op, int kSize, int kVectors>
__global__ __launch_bounds__(kTileThreads) void elementwise_activation_kernel(
    const __grid_constant__ ElementwiseActivationArgs args, unsigned tiles) {
  using V = Vec<T, kSize>;
  const int64_t row = int64_t{blockIdx.x / tiles} * blockDim.y + threadIdx.y;
  if (row >= args.num_rows) return;
  const int64_t first = (int64_t{blockIdx.x % tiles} * (blockDim.x * kVectors) + threadIdx.x) * kSize;
  const int step = blockDim.x * kSize;
  const T* input = static_cast<const T*>(args.input) + args.input_rows.offset(row) + first;
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(row) + first;

  V v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (first + k * step < args.width) v[k] = load_vec_streamed<V>(input + k * step);
  const Op op(args);
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (first + k * step < args.width) {
      auto x = to_floats(v[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = op(x[i]);
      store_vec(out + k * step, round_to<T>(x));
    }
}

template <class Op>
void run(const ElementwiseActivationArgs& args, const Launch& launch) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  const auto aligned = [&](int64_t bytes) {
    return rows_aligned(bytes, args.input, args.input_rows, size) &&
           rows_aligned(bytes, args.out, args.out_rows, size) && args.width * size % bytes == 0;
  };
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    tile_rows<T>(aligned, args.width, args.num_rows, launch.device, [&]<int kSize, int kVectors>(RowTiles tiles) {
      elementwise_activation_kernel<T, Op, kSize, kVectors>
          <<<tiles.blocks, tiles.block, 0, stream_of(launch)>>>(args, tiles.tiles);
    });
  });
}

}  // namespace

void gelu_tanh_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<GeluTanh>(args, launch);
  check_launch("gelu_tanh");
}

void gelu_quick_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<GeluQuick>(args, launch);
  check_launch("gelu_quick");
}

void relu2_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<Relu2>(args, launch);
  check_launch("relu2");
}

void xielu_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<Xielu>(args, launch);
  check_launch("xielu");
}

}  // namespace pykv
