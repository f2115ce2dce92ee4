// out = z * r * w,  r = 1 / sqrt(sum(z^2) / hidden_size + epsilon),  z = input or R_T(input + residual).
//
// A row is one thread's: a first pass for the sum (which also writes z), a second for the product, which finds the row
// in the cache.  Bound by memory for rows that come from there: each byte is moved once in and once out.
#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "norm/rms_norm.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kSums = 4;  // independent additions in flight; the order of addition is the same for every row

// Calls body(i, count) for vectors that cover n elements; only the last may count less than kWidth of them.
template <class Body>
void each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, kWidth);
  if (i < n) body(i, n - i);
}

// z = R_T(input + residual), left in residual.
template <class T>
void add_row(const T* input, T* residual, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) {
    store(residual + i, load(input + i, count) + load(residual + i, count), count);
  });
}

template <class T>
float sum_of_squares(const T* z, int64_t n) {
  Floats sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= n; i += kSums * kWidth)
    for (int k = 0; k < kSums; ++k) {
      const Floats v = load(z + i + k * kWidth);
      sums[k] += v * v;
    }
  for (; i < n; i += kWidth) {
    const Floats v = load(z + i, n - i);
    sums[0] += v * v;
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
void scale_row(T* out, const T* z, const T* weight, float r, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) {
    const Floats normed = load(z + i, count) * r;
    store(out + i, weight ? normed * load(weight + i, count) : normed, count);
  });
}

template <class T>
void norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const int64_t n = args.hidden_size;
  for (int64_t row = begin; row < end; ++row) {
    const T* z = static_cast<const T*>(args.input) + args.input_rows.offset(row);
    if (args.residual) {
      T* residual = static_cast<T*>(args.residual) + args.residual_rows.offset(row);
      add_row(z, residual, n);
      z = residual;
    }
    const float r = 1.0f / std::sqrt(sum_of_squares(z, n) / static_cast<float>(n) + args.epsilon);
    scale_row(static_cast<T*>(args.out) + args.out_rows.offset(row), z, static_cast<const T*>(args.weight), r, n);
  }
}

}  // namespace

void rms_norm_cpu(const RmsNormArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / args.hidden_size);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows, grain, [&](int64_t begin, int64_t end) { norm_rows<T>(args, begin, end); });
  });
}

}  // namespace pykv::PYKV_ISA
