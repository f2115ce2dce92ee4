// Products of rows of a and rows of b on the CPU, both unpacked to what the instruction set multiplies best.
//
// Rows of a are unpacked once for all threads, as many as the second cache has room for.  kColumns rows of b, which make columns of the
// result, are unpacked into the first cache a piece at a time, by the thread that multiplies them by all these rows of a.  Vectors that
// are wanted together lie together, [step][row]: rows a power of two apart would want the same places of a cache.  Lanes keep partial
// sums in an order of k alone, so that a row has the same bits however many there are.
//
// A `Way` to multiply has: Element; Vector, of kStep elements; Sum, a vector of partial sums; add(sum, a, b); kExcess, whether sums have too
// much, that b alone tells.
// A `Problem` has: m, n, k; Way; kScaled, whether sums of blocks of 128 elements are scaled; and
//   unpack_a(row, block, to, stride): writes a block, zeros past k, vectors `stride` elements apart
//   unpack_b(row, block, to, stride): and returns what sums have too much, lane by lane
//   a_scale(row, block), b_scale(row, block), if kScaled: the latter of kColumns rows of b alike
//   store(row, column, count, sums): of kColumns columns, the first `count` of which are there
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

constexpr int kBlock = 128;                           // of k
constexpr int kColumns = kWidth == 16 ? 8 : 4;        // of the result, and
constexpr int kTileRows = 3;                          // rows of it that are summed together
constexpr int64_t kMostRows = 126, kRowBytes = 1 << 19;  // of a, at a time

struct FloatWay {
  using Element = float;
  using Vector = Floats;
  using Sum = Floats;
  static constexpr int kStep = kWidth;
  static constexpr bool kExcess = false;
  static Sum add(Sum sum, Vector a, Vector b) { return a * b + sum; }
};

#if defined(__AVX512BF16__)
struct PairWay {
  using Element = bf16;
  using Vector = __m512bh;
  using Sum = Floats;
  static constexpr int kStep = 32;
  static constexpr bool kExcess = false;
  static Sum add(Sum sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#else
using PairWay = FloatWay;
#endif

// Sums of the lanes of each vector, side by side, in the first lanes.
template <int kCount, class V>
[[gnu::always_inline]] inline V sums_of_lanes(V (&v)[kCount]) {
  constexpr auto lanes_at = [](int stride, bool other) {
    Words lanes = {};
    for (int i = 0; i < kWidth; ++i) {
      const int lane = other ? i ^ stride : i;
      lanes[i] = static_cast<uint32_t>(i & stride ? kWidth + lane : lane);
    }
    return lanes;
  };
  int left = kCount;
  for (int stride = 1; stride < kCount; stride *= 2) {
    left /= 2;
    const Words own = lanes_at(stride, false), other = lanes_at(stride, true);
    for (int i = 0; i < left; ++i)
      v[i] = shuffle(v[2 * i], v[2 * i + 1], own) + shuffle(v[2 * i], v[2 * i + 1], other);
  }
  V all = v[0];
  for (int stride = kCount; stride < kWidth; stride *= 2) {
    Words other = {};
    for (int i = 0; i < kWidth; ++i) other[i] = static_cast<uint32_t>(i ^ stride);
    all += shuffle(all, all, other);
  }
  return all;
}

template <class Problem>
class RowProducts {
  using Way = typename Problem::Way;
  using Element = typename Way::Element;
  using Sum = typename Way::Sum;
  using Total = std::conditional_t<Problem::kScaled, Floats, Sum>;

  static constexpr int kSteps = kBlock / Way::kStep;
  static constexpr int kBlocks = 16384 / kColumns / (kBlock * static_cast<int>(sizeof(Element)));  // of a piece

 public:
  explicit RowProducts(const Problem& problem) : p_(problem), blocks_((problem.k + kBlock - 1) / kBlock) {}

  void run() {
    const int64_t fit = kRowBytes / std::max<int64_t>(1, blocks_ * kBlock * static_cast<int64_t>(sizeof(Element)));
    const int64_t most = std::clamp<int64_t>(fit / kTileRows * kTileRows, kTileRows, kMostRows);
    a_.resize(static_cast<size_t>(std::min(most, p_.m) * blocks_ * kBlock));
    for (first_ = 0; first_ < p_.m; first_ += most) {
      count_ = std::min(most, p_.m - first_);
      whole_ = count_ / kTileRows * kTileRows;
      parallel_for(count_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) unpack_row(r);
      });
      parallel_for((p_.n + kColumns - 1) / kColumns, 2, [&](int64_t begin, int64_t end) {
        Panel panel;
        for (int64_t i = begin; i < end; ++i) multiply(panel, i * kColumns);
      });
    }
  }

 private:
  struct Panel {
    alignas(64) Element b[kBlocks * kBlock * kColumns];
    Sum excess[Problem::kScaled ? kBlocks : 1][kColumns];
    Total totals[kMostRows][kColumns];
    float scale[kBlocks];
  };

  // Of a piece, tiles, of which each is [step][row of it].
  void unpack_row(int64_t r) {
    const int64_t rows = r < whole_ ? kTileRows : 1, tile = r / rows * rows;
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t piece = block / kBlocks * kBlocks;
      p_.unpack_a(first_ + r, block, tile_at(tile, piece) + (block - piece) * rows * kBlock + (r - tile) * Way::kStep,
                  rows * Way::kStep);
    }
  }
  int64_t blocks_of(int64_t piece) const { return std::min<int64_t>(kBlocks, blocks_ - piece); }
  Element* tile_at(int64_t r, int64_t piece) const {
    return const_cast<Element*>(a_.data()) + (piece * count_ + r * blocks_of(piece)) * kBlock;
  }

  void multiply(Panel& panel, int64_t column) const {
    const int count = static_cast<int>(std::min<int64_t>(kColumns, p_.n - column));
    for (auto& of_row : panel.totals) {
      if (&of_row - panel.totals >= count_) break;
      for (Total& total : of_row) total = Total{};
    }
    if constexpr (!Problem::kScaled)
      for (Sum& excess : panel.excess[0]) excess = Sum{};
    for (int64_t block = 0; block < blocks_; block += kBlocks) {
      const int here = static_cast<int>(blocks_of(block));
      if constexpr (Problem::kScaled)
        for (int i = 0; i < here; ++i) panel.scale[i] = p_.b_scale(column, block + i);
      for (int c = 0; c < kColumns; ++c)
        for (int i = 0; i < here; ++i) {
          const Sum excess = p_.unpack_b(column + std::min(c, count - 1), block + i,
                                         panel.b + (i * kBlock * kColumns + c * Way::kStep), kColumns * Way::kStep);
          Sum& of_column = panel.excess[Problem::kScaled ? i : 0][c];
          of_column = Problem::kScaled ? excess : of_column + excess;
        }
      int64_t r = 0;
      for (; r < whole_; r += kTileRows) multiply<kTileRows>(panel, r, block, here);
      for (; r < count_; ++r) multiply<1>(panel, r, block, here);
    }
    for (int64_t r = 0; r < count_; ++r) {
      if constexpr (Way::kExcess && !Problem::kScaled)
        for (int c = 0; c < kColumns; ++c) panel.totals[r][c] -= panel.excess[0][c];
      p_.store(first_ + r, column, count, sums_of_lanes(panel.totals[r]));
    }
  }

  // Rows from r on, by `here` blocks of k from `block` on.
  template <int kRows>
  void multiply(Panel& panel, int64_t r, int64_t block, int here) const {
    const Element* a = tile_at(r, block);
    const Element* b = panel.b;
    auto& totals = *reinterpret_cast<Total(*)[kRows][kColumns]>(panel.totals + r);
    Sum sums[kRows][kColumns];
    const auto add_block = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (int step = 0; step < kSteps; ++step, a += kRows * Way::kStep, b += kColumns * Way::kStep) {
        typename Way::Vector of_a[kRows];
#pragma GCC unroll 3
        for (int i = 0; i < kRows; ++i) of_a[i] = load_raw<typename Way::Vector>(a + i * Way::kStep);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
          auto of_b = load_raw<typename Way::Vector>(b + c * Way::kStep);
#if defined(__AVX2__)
          if (kRows > 1) asm("" : "+v"(of_b));  // GCC would load it for each row
#endif
#pragma GCC unroll 3
          for (int i = 0; i < kRows; ++i) sums[i][c] = Way::add(sums[i][c], of_a[i], of_b);
        }
      }
    };
    if constexpr (Problem::kScaled) {
      for (int i = 0; i < here; ++i) {
        for (int t = 0; t < kRows; ++t)
          for (int c = 0; c < kColumns; ++c) sums[t][c] = Way::kExcess ? -panel.excess[i][c] : Sum{};
        add_block();
        for (int t = 0; t < kRows; ++t) {
          const Floats scale = splat(p_.a_scale(first_ + r + t, block + i) * panel.scale[i]);
          for (int c = 0; c < kColumns; ++c) totals[t][c] += scale * __builtin_convertvector(sums[t][c], Floats);
        }
      }
    } else {
      __builtin_memcpy(sums, totals, sizeof(sums));
      for (int i = 0; i < here; ++i) add_block();
      __builtin_memcpy(totals, sums, sizeof(sums));
    }
  }

  const Problem& p_;
  const int64_t blocks_;
  int64_t first_ = 0, count_ = 0, whole_ = 0;  // rows of a that are unpacked, and those of them in tiles of kTileRows
  std::vector<Element> a_;
};

}  // namespace pykv::PYKV_ISA
