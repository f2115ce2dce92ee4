// out = R_T(activation(input)), in fp32.
//
// Memory-bound: the floor is each byte of input and out moved once.  All vectors of a thread are loaded before the first
// is used (row_tiles.cuh says which).
#include "activation/activations.cuh"
#include "activation/elementwise_activation.h"
#include "activation/row_tiles.cuh"
#include "cuda/dependent.cuh"

namespace pykv {
namespace {

struct Silu {
  __device__ explicit Silu(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return silu(x); }
};

struct Gelu {
  __device__ explicit Gelu(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return gelu(x); }
};

struct GeluTanh {
  __device__ explicit GeluTanh(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return quick_gelu_tanh(x); }
};

struct GeluQuick {
  __device__ explicit GeluQuick(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return x * sigmoid(1.702f * x); }
};

struct Relu2 {
  __device__ explicit Relu2(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return x <= 0.0f ? 0.0f : x * x; }  // NaN stays
};

struct ReluSquared {
  __device__ explicit ReluSquared(const ElementwiseActivationArgs&) {}
  __device__ float operator()(float x) const { return fmaxf(x, 0.0f) * fmaxf(x, 0.0f); }  // NaN gives 0
};

// Below zero an * expm1(min(x, eps)) + (beta - an) * x: expm1 by its series near zero, where the difference would cancel.
struct Xielu {
  float alpha_p, alpha_n, beta, slope, eps;
  __device__ explicit Xielu(const ElementwiseActivationArgs& args)
      : alpha_p(softplus(args.alpha_p)),
        alpha_n(args.beta + softplus(args.alpha_n)),
        beta(args.beta),
        slope(beta - alpha_n),
        eps(args.eps) {}
  // max(x, 0) + log(1 + e), e = exp(-|x|), by the series of 2 atanh(e / (2 + e)).
  __device__ static float softplus(float x) {
    const float e = expf(-fabsf(x)), s = e * reciprocal(2.0f + e), s2 = s * s;
    float sum = fmaf(s2, 0.15384615f, 0.18181818f);
    sum = fmaf(sum, s2, 0.22222222f);
    sum = fmaf(sum, s2, 0.28571429f);
    sum = fmaf(sum, s2, 0.4f);
    sum = fmaf(sum, s2, 0.66666667f);
    sum = fmaf(sum, s2, 2.0f);
    return fmaf(s, sum, fmaxf(x, 0.0f));
  }
  __device__ float operator()(float x) const {
    const float m = fminf(x, eps);  // eps where x is NaN: slope * x brings that back
    const float far = fmaf(alpha_n, power_of_2(m * 1.44269504f), -alpha_n);
    const float near = alpha_n * fmaf(m * m, fmaf(m, fmaf(m, 0.041666667f, 0.16666667f), 0.5f), m);
    const float negative = fmaf(slope, x, m > -0.0625f ? near : far);
    return x > 0.0f ? x * fmaf(alpha_p, x, beta) : negative;
  }
};

template <class T, class Op, int kSize, int kVectors>
__global__ __launch_bounds__(kTileThreads) void elementwise_activation_kernel(
    const __grid_constant__ ElementwiseActivationArgs args, Divider tiles) {
  using V = Vec<T, kSize>;
  const TilePart<kSize, kVectors> part(tiles, args.num_rows, args.width);
  const T* input = static_cast<const T*>(args.input) + args.input_rows.offset(part.row) + part.first;
  T* out = static_cast<T*>(args.out) + args.out_rows.offset(part.row) + part.first;
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (part.has(k)) prefetch(input + k * part.step);
  }
  have_ready(out);
  begin_dependent();
  if (part.end > 0 && !args.mask.has(part.row)) return;

  V v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (part.has(k)) v[k] = load_vec<V>(input + k * part.step);
  const Op op(args);
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (part.has(k)) {
      auto x = to_floats(v[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = op(x[i]);
      store_vec(out + k * part.step, round_to<T>(x));
    }
}

template <class Op>
void run(const char* op, const ElementwiseActivationArgs& args, const Launch& launch) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  const auto aligned = [&](int64_t bytes) {
    return rows_aligned(bytes, args.input, args.input_rows, size) &&
           rows_aligned(bytes, args.out, args.out_rows, size) && args.width * size % bytes == 0;
  };
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    tile_rows<T>(aligned, args.width, args.num_rows, launch.device, [&]<int kSize, int kVectors>(RowTiles tiles) {
      launch_dependent(elementwise_activation_kernel<T, Op, kSize, kVectors>, tiles.blocks, tiles.block, launch, op,
                       args, tiles.tiles);
    });
  });
}

}  // namespace

void silu_cuda(const ElementwiseActivationArgs& args, const Launch& launch) { run<Silu>("silu", args, launch); }

void gelu_cuda(const ElementwiseActivationArgs& args, const Launch& launch) { run<Gelu>("gelu", args, launch); }

void gelu_tanh_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<GeluTanh>("gelu_tanh", args, launch);
}

void gelu_quick_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<GeluQuick>("gelu_quick", args, launch);
}

void relu2_cuda(const ElementwiseActivationArgs& args, const Launch& launch) { run<Relu2>("relu2", args, launch); }

void relu_squared_cuda(const ElementwiseActivationArgs& args, const Launch& launch) {
  run<ReluSquared>("relu_squared", args, launch);
}

void xielu_cuda(const ElementwiseActivationArgs& args, const Launch& launch) { run<Xielu>("xielu", args, launch); }

}  // namespace pykv
