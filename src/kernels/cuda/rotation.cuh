// Rotation of pairs of elements of a head: x' = x * cos - y * sin,  y' = y * cos + x * sin.
//
// A thread holds kSize pairs in two vectors of kSize elements: (low[j], high[j]) in NeoX style; neighbours, low before
// high, in GPT-J style.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/rotation.h"
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"

namespace pykv {

template <int kSize>
struct Angles {
  Vec<float, kSize> cosines, sines;
};

// kSize cosines and sines from frequency `i` on, of a position inside the cache.
template <int kSize>
__device__ Angles<kSize> load_angles(const Rotation& rotation, int64_t position, int i) {
  const auto load = [&]<class C>() {
    using V = Vec<C, kSize>;
    const C* row = static_cast<const C*>(rotation.cos_sin_cache) + position * rotation.cache_stride;
    const V cosines = load_vec<V>(row + i),
            sines = load_vec<V>(row + rotation.sines + i);  // both before either is used
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

// Before the wait for the kernel before: prefetches the angles of the position that lies at `at`.  It may not be written yet,
// so it is but a guess, taken past L1, which would keep it.
__device__ inline void prefetch_angles(const Rotation& rotation, int64_t at, int i) {
  int64_t position;
  if (rotation.positions.is_int64) {
    asm volatile("ld.global.cg.s64 %0, [%1];"
                 : "=l"(position)
                 : "l"(static_cast<const int64_t*>(rotation.positions.data) + at));
  } else {
    int32_t narrow;
    asm volatile("ld.global.cg.s32 %0, [%1];"
                 : "=r"(narrow)
                 : "l"(static_cast<const int32_t*>(rotation.positions.data) + at));
    position = narrow;
  }
  if (position < 0 || position >= rotation.max_position) return;
  const int64_t size = static_cast<int64_t>(size_of(rotation.cache_dtype));
  const char* row = static_cast<const char*>(rotation.cos_sin_cache) + position * rotation.cache_stride * size;
  prefetch(row + i * size);
  prefetch(row + (rotation.sines + i) * size);
}

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

// Two pairs at once, as words: first elements in x, second ones in y.  In the arithmetic of T, nothing contracted.
template <class T>
__device__ __forceinline__ void rotate_words(uint32_t& x, uint32_t& y, uint32_t cosines, uint32_t sines) {
  using Pair = std::conditional_t<std::is_same_v<T, half>, half2, __nv_bfloat162>;
  const auto pair = [](const uint32_t& word) { return reinterpret_cast<const Pair&>(word); };
  const Pair new_x = __hsub2_rn(__hmul2_rn(pair(x), pair(cosines)), __hmul2_rn(pair(y), pair(sines)));
  const Pair new_y = __hadd2_rn(__hmul2_rn(pair(y), pair(cosines)), __hmul2_rn(pair(x), pair(sines)));
  x = reinterpret_cast<const uint32_t&>(new_x);
  y = reinterpret_cast<const uint32_t&>(new_y);
}

// In the arithmetic of T: cosines, sines, each product and each sum are rounded to it.
template <bool kNeox, class T, int kSize>
__device__ __forceinline__ void rotate_in_dtype(Vec<T, kSize>& low, Vec<T, kSize>& high, const Angles<kSize>& angles) {
  if constexpr (sizeof(T) == 4) {
    rotate<kNeox>(low, high, angles);
  } else if constexpr (kSize == 1) {
    uint32_t x = reinterpret_cast<const uint16_t&>(low), y = reinterpret_cast<const uint16_t&>(high);
    rotate_words<T>(x, y, word_from_floats<T>(angles.cosines[0], 0.0f), word_from_floats<T>(angles.sines[0], 0.0f));
    reinterpret_cast<uint16_t&>(low) = static_cast<uint16_t>(x);
    reinterpret_cast<uint16_t&>(high) = static_cast<uint16_t>(y);
  } else {
    constexpr int kWords = kSize / 2;
    const auto cosines = round_to<T>(angles.cosines), sines = round_to<T>(angles.sines);
    const auto word = [&](int i) -> uint32_t& { return i < kWords ? low.words[i] : high.words[i - kWords]; };
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      if constexpr (kNeox) {
        rotate_words<T>(low.words[j], high.words[j], cosines.words[j], sines.words[j]);
      } else {
        uint32_t &first = word(2 * j), &second = word(2 * j + 1);  // a pair each
        uint32_t x = __byte_perm(first, second, 0x5410), y = __byte_perm(first, second, 0x7632);
        rotate_words<T>(x, y, cosines.words[j], sines.words[j]);
        first = __byte_perm(x, y, 0x5410);
        second = __byte_perm(x, y, 0x7632);
      }
    }
  }
}

// Whether vectors of `count` elements fit the rows of the cache and the halves of the rotary dimension.
inline bool angles_fit(const Rotation& rotation, int count) {
  const int64_t half_dim = rotation.rotary_dim / 2, size = static_cast<int64_t>(size_of(rotation.cache_dtype));
  return half_dim % count == 0 && is_aligned(std::min<int64_t>(count * size, kAccessBytes), rotation.cos_sin_cache,
                                             {rotation.cache_stride * size, rotation.sines * size});
}

// Whether they are aligned in every head.
inline bool heads_fit(const RotaryHeads& heads, int64_t size, int count) {
  return heads.num_heads == 0 ||
         is_aligned(count * size, heads.data, {heads.batch * size, heads.token * size, heads.head * size});
}

}  // namespace pykv
