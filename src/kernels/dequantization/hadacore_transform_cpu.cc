// Twin of hadacore_transform.cu: rows shared out among threads, each turned in a buffer of floats.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"
#include "dequantization/hadacore_transform.h"
#include "dequantization/hadamard.h"

namespace pykv::PYKV_ISA {
namespace {

// The steps within a vector: a lane and its partner become their sum and difference.
template <int kStep>
[[gnu::always_inline]] inline Floats within(Floats v, int64_t end) {
  if constexpr (kStep < kWidth) {
    if (kStep >= end) return v;
    Words partners{};
    Floats signs{};  // both are filled below; GCC 12 does not see it
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

// As many vectors as registers hold beside what they wait for.
constexpr int kTogether = kWidth == 16 ? 16 : 4;

[[gnu::always_inline]] inline void butterflies_of_vectors(Floats (&v)[kTogether]) {
#pragma GCC unroll 4
  for (int step = 1; step < kTogether; step *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i)
      if ((i & step) == 0) {
        const Floats a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
}

// All steps within so many neighbours.
constexpr int64_t kNeighbours = kTogether * kWidth;
template <class T>
void turn_neighbours(const T* from, const T* next, float* x, int64_t width) {
  for (int64_t first = 0; first < width; first += kNeighbours) {
    prefetch_bytes(next + first, kNeighbours * static_cast<int64_t>(sizeof(T)));
    Floats v[kTogether];
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) v[i] = within<1>(load(from + first + i * kWidth), kWidth);
    butterflies_of_vectors(v);
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) store(x + first + i * kWidth, v[i]);
  }
}
// The last steps of a row of kTogether times as many, which go to their place.
template <class T>
void turn_last(const float* x, T* to, float scale) {
  for (int64_t at = 0; at < kNeighbours; at += kWidth) {
    Floats v[kTogether];
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) v[i] = load(x + i * kNeighbours + at);
    butterflies_of_vectors(v);
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) store(to + i * kNeighbours + at, v[i] * scale);
  }
}

// Columns of `order` elements, `step` apart, times the matrix of that order: so many rows of it at once as share what they read.
template <int kOrder>
void multiply(const float* x, float* y, int64_t step) {
  static constexpr HadamardSigns<kOrder> kSigns;
  constexpr int kRows = 4;
  static_assert(kOrder % kRows == 0);
  float signs[kOrder][kOrder];  // those of rows that go together side by side
  for (int i = 0; i < kOrder; ++i)
    for (int j = 0; j < kOrder; ++j)
      signs[i / kRows * kRows + j * kRows / kOrder][j * kRows % kOrder + i % kRows] =
          kSigns.rows[i] >> j & 1 ? -1.0f : 1.0f;
  for (int64_t c = 0; c < step; c += kWidth) {
    const bool whole = step - c >= kWidth;
    for (int i = 0; i < kOrder; i += kRows) {
      Floats sums[kRows]{};
      const float* sign = signs[i];
      for (int j = 0; j < kOrder; ++j, sign += kRows) {
        const float* const from = x + j * step + c;
        const Floats v = whole ? load(from) : load(from, step - c);
        for (int k = 0; k < kRows; ++k) sums[k] += v * sign[k];
      }
      for (int k = 0; k < kRows; ++k) store(y + (i + k) * step + c, sums[k], step - c);
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
    LineWriter writer(args.num_rows * width * static_cast<int64_t>(sizeof(T)) > kWorthStreaming);
    std::vector<T> turned(writer.streamed() ? row.size() : 0);
    const bool whole = width % kWidth == 0, together = step >= kNeighbours;
    for (int64_t r = begin; r < end; ++r) {
      const T* from = static_cast<const T*>(args.input) + args.input_rows.offset(r);
      T* const out = static_cast<T*>(args.output) + args.output_rows.offset(r);
      T* const to = writer.streamed() ? turned.data() : out;
      float* x = row.data();
      if (together) {
        const int64_t next = r + 1 < end ? args.input_rows.offset(r + 1) : args.input_rows.offset(r);
        turn_neighbours(from, static_cast<const T*>(args.input) + next, x, width);
      } else {
        for (int64_t i = 0; i < width; i += kWidth) {
          const Floats v = load(from + i, width - i);
          store(x + i, whole ? within<1>(v, step) : v, width - i);
        }
      }
      if (width == kTogether * kNeighbours && !multiply) {
        turn_last(x, to, args.scale);
      } else {
        butterflies(x, width, together ? kNeighbours : whole ? kWidth : 1, step);
        if (multiply) {
          multiply(x, other.data(), step);
          x = other.data();
        }
        for (int64_t i = 0; i < width; i += kWidth) store(to + i, load(x + i, width - i) * args.scale, width - i);
      }
      if (to != out) writer.put(out, to, width * static_cast<int64_t>(sizeof(T)));
    }
  });
}

}  // namespace

void hadacore_transform_cpu(const HadacoreTransformArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { transform<T>(args); });
}

}  // namespace pykv::PYKV_ISA
