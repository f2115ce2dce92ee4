// What packed_gemm does to its sums on CUDA before they are rounded: the same bits from each of its kernels.
#pragma once

#include "cuda/gelu.cuh"
#include "cuda/mma.cuh"
#include "cuda/quantise.cuh"
#include "cuda/silu.cuh"
#include "gemm/packed_gemm.h"

namespace pykv {

__device__ inline float gated(Gate gate, float a, float b) {
  if (gate == Gate::kSilu) return __fmul_rn(silu(a), b);
  return __fmul_rn(gate == Gate::kGelu ? gelu(a) : gelu_tanh(a), b);
}

// Of row `at` of out, from the sums of rows n to n + 3 of the weight, a multiple of four, of which `rows` are there.
template <class T>
__device__ void finish_four(const Epilogue& e, const T* bias, const float4& sums, int64_t at, int64_t n, int rows,
                            void* out, int64_t out_stride) {
  float v[4] = {sums.x, sums.y, sums.z, sums.w};
  const float of_token = e.token_scales ? __ldg(e.token_scales + at * e.token_stride) : 1.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= rows) continue;
    if (e.channel_scales) v[i] = __fmul_rn(__ldg(e.channel_scales + (n + i) * e.channel_stride), v[i]);
    v[i] = fmaf(of_token, v[i], bias ? to_float(bias[n + i]) : 0.0f);
  }
  if (e.gate != Gate::kNone) {
    v[0] = gated(e.gate, v[0], v[1]);
    v[1] = gated(e.gate, v[2], v[3]);
    n /= 2;
    rows /= 2;
  }
  if (e.residual) {
    const T* const residual = static_cast<const T*>(e.residual) + at * e.residual_stride + n;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < rows) v[i] = __fadd_rn(v[i], to_float(residual[i]));
  }
  const int64_t to = at * out_stride + n;
  if (e.has_codes) {
    const float factor = 1.0f / e.out_scale;
#pragma unroll
    for (float& x : v) x = __fmul_rn(x, factor);
    const uint32_t codes = e.codes == QuantCode::kInt8 ? quantise4<DType::kInt8>(v[0], v[1], v[2], v[3])
                                                       : quantise4<DType::kFloat8E4M3>(v[0], v[1], v[2], v[3]);
    auto* const bytes = static_cast<uint8_t*>(out) + to;
    if (rows == 4 && reinterpret_cast<uintptr_t>(bytes) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(bytes) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < rows) bytes[i] = static_cast<uint8_t>(codes >> 8 * i);
    }
    return;
  }
  const uint2 pairs = make_uint2(pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]));
  auto* const halves = static_cast<uint16_t*>(out) + to;
  if (rows == 4 && reinterpret_cast<uintptr_t>(halves) % 8 == 0) {
    *reinterpret_cast<uint2*>(halves) = pairs;
  } else if (rows == 2 && reinterpret_cast<uintptr_t>(halves) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(halves) = pairs.x;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < rows) halves[i] = static_cast<uint16_t>((i < 2 ? pairs.x : pairs.y) >> 16 * (i % 2));
  }
}

}  // namespace pykv
