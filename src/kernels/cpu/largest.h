// The largest magnitudes of groups of numbers that become codes by it; NaN does not count.
//
// Magnitudes are compared as the integers of their bits, where NaN is above infinity: who finds it there looks again, and all
// others know that there is none.  What one vector's lanes hold is found for as many groups as a vector has lanes at once.
#pragma once

#include <cmath>

#include "cpu/pairs.h"

namespace pykv::PYKV_ISA {

// Lane i is the largest lane of v[i].
inline Words largest_lanes(Words* v) {
  return reduce_each(v, [](Words a, Words b) { return a > b ? a : b; });
}

// The largest of `count` numbers, one after the other.
template <class T>
[[gnu::noinline]] float largest_number(const T* values, int64_t count) {
  float most = 0.0f;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(to_float(values[i])));  // passes NaN over
  return most;
}

// Of floats in pairs of T.
template <class T>
class LargestFloat {
 public:
  void take(Pair<T> v) {
    const Words x = __builtin_bit_cast(Words, abs(v.x)), y = __builtin_bit_cast(Words, abs(v.y));
    x_ = x > x_ ? x : x_, y_ = y > y_ ? y : y_;
  }
  Words lanes() const { return x_ > y_ ? x_ : y_; }

 private:
  Words x_ = {}, y_ = {};
};

// Of numbers that are kept rounded to T, in whole pairs.
template <class T>
class Largest : public LargestFloat<T> {
 public:
  void keep(T* to, Pair<T> v) {
    store_pair(to, v, kPair);
    this->take(v);
  }
  static Floats values(Words lanes) { return rounded<T>(__builtin_bit_cast(Floats, lanes)); }  // which keeps the order
};

#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class Largest<T> {
 public:
  void keep(T* to, Pair<T> v) {
    const PairHalfwords halves = packed(v), magnitudes = halves & 0x7fff;
    store_raw(to, halves, false);
    most_ = magnitudes > most_ ? magnitudes : most_;
  }
  Words lanes() const {
    const Words both = __builtin_bit_cast(Words, most_), low = both & 0xffffu, high = both >> 16;
    return low > high ? low : high;
  }
  static Floats values(Words lanes) {
    if constexpr (kAlternating<T>) return __builtin_bit_cast(Floats, lanes << 16);
    return _mm512_maskz_cvtph_ps(0xffff, __builtin_bit_cast(__m256i, narrow_to_halfwords(lanes)));
  }

 private:
  PairHalfwords most_ = {};
};
#endif

}  // namespace pykv::PYKV_ISA
