// Elements quantised by a scale, and what such a scale is found from.
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// to[i * to_dim] = f(from[i * dim]), rounded to Code.  f takes floats and vectors of them.
template <class T, class Code, class F>
void convert(Code* to, int64_t to_dim, const T* from, int64_t dim, int64_t size, F&& f) {
  if (dim == 1 && to_dim == 1) {
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) store(to + i, f(load(from + i)));
    if (i < size) store(to + i, f(load(from + i, size - i)), size - i);
  } else {
    for (int64_t i = 0; i < size; ++i) to[i * to_dim] = from_float<Code>(f(to_float(from[i * dim])));
  }
}

template <class T, class Code>
void quantise(Code* to, int64_t to_dim, const T* from, int64_t dim, int64_t size, float scale) {
  convert(to, to_dim, from, dim, size, [scale](auto x) { return x / scale; });
}

// NaN is not counted.
template <class T>
float largest_magnitude(const T* from, int64_t dim, int64_t size) {
  if (dim == 1) {
    // magnitudes have the order of their bits, and integers a maximum that is quickly had; NaN counts as 0
    Words most{};
    const auto take = [&](Floats x) {
      Words m = __builtin_bit_cast(Words, x) & 0x7fffffffu;
      m = m > 0x7f800000u ? Words{} : m;
      most = m > most ? m : most;
    };
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) take(load(from + i));
    if (i < size) take(load(from + i, size - i));
    return max(__builtin_bit_cast(Floats, most));
  }
  float most = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float v = __builtin_fabsf(to_float(from[i * dim]));
    most = v > most ? v : most;
  }
  return most;
}

}  // namespace pykv::PYKV_ISA
