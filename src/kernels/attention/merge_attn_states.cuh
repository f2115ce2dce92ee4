// How merged rows are stored, in the dtype of the parts or as E4M3.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/vec.cuh"

namespace pykv {

template <int kSize>
__device__ void store_row_part(uint8_t* to, const Vec<float, kSize>& v, float scale) {
  const Quotient one(1.0f);
  if constexpr (kSize == 1) {
    *to = to_fp8<KvFormat::kE4M3>(v[0] * scale, one);
  } else {
    Vec<uint32_t, kSize / 4> codes;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const uint32_t words[4] = {__float_as_uint(v[i] * scale), __float_as_uint(v[i + 1] * scale),
                                 __float_as_uint(v[i + 2] * scale), __float_as_uint(v[i + 3] * scale)};
      codes[i / 4] = to_fp8x4<KvFormat::kE4M3, float>(words, one);
    }
    store_vec(to, codes);
  }
}
template <class T, int kSize>
__device__ void store_row_part(T* to, const Vec<float, kSize>& v, float) {
  store_vec(to, round_to<T>(v));
}

}  // namespace pykv
