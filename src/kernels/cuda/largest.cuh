// The largest magnitudes of packs, NaN being passed over.
#pragma once

#include "cuda/pairs.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// The largest magnitude, NaN being passed over.  As it is found: of 16-bit numbers two, signs meaning nothing.
template <class T, int kSize>
__device__ auto largest_parts(const Vec<T, kSize>& v) {
  if constexpr (kInWords<T, kSize>) {
    uint32_t most = v.words[0];
#pragma unroll
    for (int i = 1; i < kSize / 2; ++i) most = larger_magnitudes<T>(most, v.words[i]);
    return most;
  } else {
    const auto floats = to_floats(v);
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) most = fmaxf(most, fabsf(floats[i]));
    return most;
  }
}
template <class T, int kSize>
__device__ float largest_of(const Vec<T, kSize>& v) {
  if constexpr (kInWords<T, kSize>) {
    const float2 pair = word_to_floats<T>(largest_parts(v) & 0x7fff7fffu);
    return fmaxf(fmaxf(pair.x, pair.y), 0.0f);
  } else {
    return largest_parts(v);
  }
}

// Of several packs.
template <class T, int kSize, int kCount>
__device__ float largest_of(const Vec<T, kSize> (&v)[kCount]) {
  if constexpr (kInWords<T, kSize>) {
    Vec<T, kSize> most = v[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k)
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) most.words[i] = larger_magnitudes<T>(most.words[i], v[k].words[i]);
    return largest_of(most);
  } else {
    float most = largest_of(v[0]);
#pragma unroll
    for (int k = 1; k < kCount; ++k) most = fmaxf(most, largest_of(v[k]));
    return most;
  }
}

}  // namespace pykv
