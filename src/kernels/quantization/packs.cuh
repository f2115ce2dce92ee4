// Packs of rows that may end within one, or lie anyhow.
#pragma once

#include "cuda/vec.cuh"

namespace pykv {

template <class T>
__device__ Pack<T> load_pack(const T* from, int64_t count, bool aligned) {
  if (aligned && count >= kPackSize<T>) return load_vec_in_order<Pack<T>>(from);
  return load_some<Pack<T>>(from, static_cast<int>(count < kPackSize<T> ? count : kPackSize<T>));
}

template <int kSize>
__device__ void store_codes(uint8_t* to, const Vec<uint8_t, kSize>& codes, int64_t count, bool aligned) {
  if (aligned && count >= kSize) return store_vec(to, codes);
  store_some(to, codes, static_cast<int>(count < kSize ? count : kSize));
}

}  // namespace pykv
