// Rotation of pairs of elements of a head: x' = x * cos - y * sin,  y' = y * cos + x * sin.
//
// A thread holds kSize pairs in two vectors of kSize elements: (low[j], high[j]) in NeoX style; neighbours, low before
// high, in GPT-J style.
#pragma once

#include <algorithm>

#include "core/rotation.h"
#include "cuda/vec.cuh"

namespace pykv {

template <int kSize>
struct Angles {
  Vec<float, kSize> cosines, sines;
};

// kSize cosines and sines from frequency `i` on, of a position inside the cache.
template <int kSize>
__device__ Angles<kSize> load_angles(const Rotation& rotation, int64_t position, int i) {
  const int half_dim = static_cast<int>(rotation.rotary_dim) / 2;
  const auto load = [&]<class C>() {
    using V = Vec<C, kSize>;
    const C* row = static_cast<const C*>(rotation.cos_sin_cache) + position * rotation.cache_stride;
    const V cosines = load_vec<V>(row + i), sines = load_vec<V>(row + half_dim + i);  // both before either is used
    return Angles<kSize>{to_floats(cosines), to_floats(sines)};
  };
  switch (rotation.cache_dtype) {
    case DType::kFloat16:
      return load.template operator()<half>();
    case DType::kBFloat16:
      return load.template operator()<bf16>();
    default:
      return load.template operator()<float>();
  }
}

// A position on its way, as the words it consists of.
class PositionLoad {
 public:
  __device__ PositionLoad(const Index& positions, int64_t at) {
    const int32_t* words = static_cast<const int32_t*>(positions.data);
    low_ = words[positions.is_int64 ? 2 * at : at];
    high_ = words[positions.is_int64 ? 2 * at + 1 : at];
  }
  // Waits for it; what was started before stays before.
  __device__ int64_t wait(bool is_int64) {
    asm volatile("" : "+r"(low_), "+r"(high_));
    return is_int64 ? int64_t{high_} << 32 | static_cast<uint32_t>(low_) : int64_t{low_};
  }

 private:
  int32_t low_, high_;
};

// In fp32, rounded once.  Contractions are spelled out, so that every kernel gives the same bits.
template <bool kNeox, class T, int kSize>
__device__ __forceinline__ void rotate(Vec<T, kSize>& low, Vec<T, kSize>& high, const Angles<kSize>& angles) {
  const Vec<float, kSize> given[2] = {to_floats(low), to_floats(high)};
  Vec<float, kSize> rotated[2];
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    // element j of x and of y: side by side in two vectors (NeoX), or in turn
    const int at_x = kNeox ? j : 2 * j, at_y = kNeox ? kSize + j : 2 * j + 1;
    const float x = given[at_x / kSize][at_x % kSize], y = given[at_y / kSize][at_y % kSize];
    rotated[at_x / kSize][at_x % kSize] = fmaf(x, angles.cosines[j], -(y * angles.sines[j]));
    rotated[at_y / kSize][at_y % kSize] = fmaf(y, angles.cosines[j], x * angles.sines[j]);
  }
  low = round_to<T>(rotated[0]);
  high = round_to<T>(rotated[1]);
}

// Whether vectors of `count` elements fit the rows of the cache and the halves of the rotary dimension.
inline bool angles_fit(const Rotation& rotation, int count) {
  const int64_t half_dim = rotation.rotary_dim / 2, size = static_cast<int64_t>(size_of(rotation.cache_dtype));
  return half_dim % count == 0 && is_aligned(std::min<int64_t>(count * size, kAccessBytes), rotation.cos_sin_cache,
                                             {rotation.cache_stride * size, half_dim * size});
}

// Whether they are aligned in every head.
inline bool heads_fit(const RotaryHeads& heads, int64_t size, int count) {
  return heads.num_heads == 0 ||
         is_aligned(count * size, heads.data, {heads.batch * size, heads.token * size, heads.head * size});
}

}  // namespace pykv
