// Twin of hadacore_transform.cu: rows shared out among threads, each turned in a buffer of floats.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "dequantization/hadacore_transform.h"
#include "dequantization/hadamard.h"

namespace pykv::PYKV_ISA {
namespace {

// Sums and differences of neighbours `step` apart.
void butterflies(float* x, int64_t count, int64_t step) {
  for (int64_t first = 0; first < count; first += 2 * step) {
    float *low = x + first, *high = low + step;
    for (int64_t i = 0; i < step; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a + b;
      high[i] = a - b;
    }
  }
}

// Columns of `order` elements, `step` apart, times the matrix of that order.
template <int kOrder>
void multiply(const float* x, float* y, int64_t step) {
  static constexpr HadamardSigns<kOrder> kSigns;
  for (int i = 0; i < kOrder; ++i) {
    float* to = y + i * step;
    for (int64_t c = 0; c < step; ++c) to[c] = 0;
    for (int j = 0; j < kOrder; ++j) {
      const float sign = kSigns.rows[i] >> j & 1 ? -1.0f : 1.0f;
      const float* from = x + j * step;
      for (int64_t c = 0; c < step; ++c) to[c] += sign * from[c];
    }
  }
}

using Multiply = void (*)(const float* x, float* y, int64_t step);

Multiply multiply_by(int32_t order) {
  switch (order) {
    case 12:
      return multiply<12>;
    case 20:
      return multiply<20>;
    case 28:
      return multiply<28>;
    case 40:
      return multiply<40>;
    default:
      return nullptr;
  }
}

template <class T>
void transform(const HadacoreTransformArgs& args) {
  const int64_t step = int64_t{1} << args.log2, width = args.order * step;
  const Multiply multiply = multiply_by(args.order);
  parallel_for(args.num_rows, std::max<int64_t>(1, 8192 / width), [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(width)), other(multiply ? row.size() : 0);
    for (int64_t r = begin; r < end; ++r) {
      const T* from = static_cast<const T*>(args.input) + args.input_rows.offset(r);
      T* to = static_cast<T*>(args.output) + args.output_rows.offset(r);
      float* x = row.data();
      for (int64_t i = 0; i < width; i += kWidth) store(x + i, load(from + i, width - i), width - i);
      for (int64_t s = 1; s < step; s *= 2) butterflies(x, width, s);
      if (multiply) {
        multiply(x, other.data(), step);
        x = other.data();
      }
      for (int64_t i = 0; i < width; i += kWidth) store(to + i, load(x + i, width - i) * args.scale, width - i);
    }
  });
}

}  // namespace

void hadacore_transform_cpu(const HadacoreTransformArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { transform<T>(args); });
}

}  // namespace pykv::PYKV_ISA
