// Vectors of one-byte codes times a scale, rounded to T.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/int8.cuh"
#include "cuda/nvfp4.cuh"
#include "cuda/vec.cuh"

namespace pykv {

template <class T, KvFormat kFormat, int kSize>
__device__ Vec<T, kSize> dequantise(const Vec<uint8_t, kSize>& codes, float scale) {
  constexpr bool kInt8 = kFormat == KvFormat::kInt8;
  Vec<float, kSize> x;
  if constexpr (kSize == 1 && kInt8) {
    x[0] = int8_to_float(codes[0]) * scale;
  } else if constexpr (kSize == 1) {
    x[0] = fp8_to_float<kFormat>(codes[0]) * scale;
  } else if constexpr (kInt8) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      float quad[4];
      int8x4_to_floats(codes.words[i / 4], quad);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = quad[j] * scale;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const float2 pair = fp8x2_to_float2<kFormat>(static_cast<uint16_t>(codes.words[i / 4] >> (i % 4 * 8)));
      x[i] = pair.x * scale;
      x[i + 1] = pair.y * scale;
    }
  }
  return round_to<T>(x);
}

// Eight codes of a block of nvfp4: element times block scale is exact, the global scale rounds.
template <class T>
__device__ Vec<T, 8> dequantise(uint32_t codes, uint8_t scale, float global) {
  half2 values[4];
  nvfp4x8_to_half2x4(codes, scale, values);
  Vec<float, 8> x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(values[i]);
    x[2 * i] = pair.x * global;
    x[2 * i + 1] = pair.y * global;
  }
  return round_to<T>(x);
}

}  // namespace pykv
