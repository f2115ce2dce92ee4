// Elements quantised by a scale, and what such a scale is found from.
#pragma once

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// to[i * to_dim] = from[i * dim] / scale, rounded to Code.
template <class T, class Code>
void quantise(Code* to, int64_t to_dim, const T* from, int64_t dim, int64_t size, float scale) {
  if (dim == 1 && to_dim == 1) {
    const Floats divisor = splat(scale);
    for (int64_t i = 0; i < size; i += kWidth) store(to + i, load(from + i, size - i) / divisor, size - i);
  } else {
    for (int64_t i = 0; i < size; ++i) to[i * to_dim] = from_float<Code>(to_float(from[i * dim]) / scale);
  }
}

// NaN is not counted.
template <class T>
float largest_magnitude(const T* from, int64_t dim, int64_t size) {
  if (dim == 1) {
    Floats most{};
    for (int64_t i = 0; i < size; i += kWidth) {
      const Floats v = load(from + i, size - i);
      most = max(v < 0.0f ? -v : v, most);
    }
    return max(most);
  }
  float most = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float v = __builtin_fabsf(to_float(from[i * dim]));
    most = v > most ? v : most;
  }
  return most;
}

}  // namespace pykv::PYKV_ISA
