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

// The steps within a vector: a lane and its partner become their sum and difference.
template <int kStep>
Floats within(Floats v, int64_t end) {
  if constexpr (kStep < kWidth) {
    if (kStep >= end) return v;
    Words partners;
    Floats signs;
    for (int i = 0; i < kWidth; ++i) {
      partners[i] = static_cast<uint32_t>(i ^ kStep);
      signs[i] = i & kStep ? -1.0f : 1.0f;
    }
    return within<2 * kStep>(v * signs + shuffle(v, v, partners), end);
  }
  return v;
}

// Sums and differences of elements `step` apart, up to `end`; two steps at once, which halves the way through memory.
void butterflies(float* x, int64_t width, int64_t step, int64_t end) {
  for (; 4 * step <= end && step >= kWidth; step *= 4)
    for (int64_t first = 0; first < width; first += 4 * step)
      for (int64_t i = first; i < first + step; i += kWidth) {
        const Floats a = load(x + i), b = load(x + i + step), c = load(x + i + 2 * step), d = load(x + i + 3 * step);
        const Floats ab = a + b, cd = c + d, less = a - b, minus = c - d;
        store(x + i, ab + cd);
        store(x + i + step, less + minus);
        store(x + i + 2 * step, ab - cd);
        store(x + i + 3 * step, less - minus);
      }
  for (; step < end; step *= 2)
    for (int64_t first = 0; first < width; first += 2 * step)
      for (int64_t i = first; i < first + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
}

// Columns of `order` elements, `step` apart, times the matrix of that order.
template <int kOrder>
void multiply(const float* x, float* y, int64_t step) {
  static constexpr HadamardSigns<kOrder> kSigns;
  float signs[kOrder][kOrder];
  for (int i = 0; i < kOrder; ++i)
    for (int j = 0; j < kOrder; ++j) signs[i][j] = kSigns.rows[i] >> j & 1 ? -1.0f : 1.0f;
  for (int64_t c = 0; c < step; c += kWidth)
    for (int i = 0; i < kOrder; ++i) {
      Floats even{}, odd{};
      for (int j = 0; j < kOrder; j += 2) {
        even += load(x + j * step + c, step - c) * signs[i][j];
        odd += load(x + (j + 1) * step + c, step - c) * signs[i][j + 1];
      }
      store(y + i * step + c, even + odd, step - c);
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
      const bool whole = width % kWidth == 0;
      for (int64_t i = 0; i < width; i += kWidth) {
        const Floats v = load(from + i, width - i);
        store(x + i, whole ? within<1>(v, step) : v, width - i);
      }
      butterflies(x, width, whole ? kWidth : 1, step);
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
