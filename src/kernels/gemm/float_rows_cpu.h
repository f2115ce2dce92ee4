// Products of matrices that are unpacked to fp32, some rows at a time, on the CPU.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// sums[r][c] of kRows rows of a and kColumns of b, each of `k` elements, a multiple of kWidth.
template <int kRows, int kColumns>
void dot_rows(const float* a, const float* b, int64_t k, float (&sums)[kRows][kColumns]) {
  Floats lanes[kRows][kColumns] = {};
  for (int64_t i = 0; i < k; i += kWidth)
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) lanes[r][c] = load(a + r * k + i) * load(b + c * k + i) + lanes[r][c];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) {
      Floats v = lanes[r][c];
      for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
      sums[r][c] = v[0];
    }
}

// [m, k] times the transpose of [n, k].  unpack_a(row, to) and unpack_b(row, to) write k floats; store(row, column, sum).
template <class UnpackA, class UnpackB, class Store>
void multiply_floats(int64_t m, int64_t n, int64_t k, UnpackA unpack_a, UnpackB unpack_b, Store store) {
  constexpr int kColumns = 4, kRows = kWidth == 16 ? 4 : 2;
  constexpr int64_t kChunk = 64;  // rows of a that are kept unpacked
  const int64_t padded = (k + 15) / 16 * 16;
  std::vector<float> a(static_cast<size_t>(std::min(kChunk, m) * padded));
  for (int64_t first = 0; first < m; first += kChunk) {
    const int64_t rows = std::min(kChunk, m - first);
    parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) unpack_a(first + r, a.data() + r * padded);
    });
    parallel_for((n + kColumns - 1) / kColumns, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> b(static_cast<size_t>(kColumns * padded));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t column = i * kColumns, count = std::min<int64_t>(kColumns, n - column);
        for (int64_t c = 0; c < count; ++c) unpack_b(column + c, b.data() + c * padded);
        int64_t r = 0;
        const auto tile = [&]<int kTile>() {
          float sums[kTile][kColumns];
          dot_rows<kTile, kColumns>(a.data() + r * padded, b.data(), padded, sums);
          for (int t = 0; t < kTile; ++t)
            for (int64_t c = 0; c < count; ++c) store(first + r + t, column + c, sums[t][c]);
          r += kTile;
        };
        while (r + kRows <= rows) tile.template operator()<kRows>();
        while (r < rows) tile.template operator()<1>();
      }
    });
  }
}

}  // namespace pykv::PYKV_ISA
