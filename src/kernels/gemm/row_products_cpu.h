// Products of rows of a and rows of b on the CPU, both unpacked to what the instruction set multiplies best.
//
// Rows of a are unpacked once for all threads, as many as the second cache has room for.  kColumns rows of b, which make columns of the
// result, are unpacked into the first cache a piece at a time, by the thread that multiplies them by all these rows of a.  Vectors that
// are wanted together lie together, [step][row]: rows a power of two apart would want the same places of a cache.  Lanes keep partial
// sums in an order of k alone, so that a row has the same bits however many there are.
//
// A `Way` to multiply has: Element; Vector, of kStep elements; Sum, a vector of partial sums; add(sum, a, b); kExcess, whether sums
// are too large by what depends on b alone.
// A `Problem` has: m, n, k; Way; kScaled, whether sums of blocks of 128 elements are scaled; and
//   unpack_a(row, block, to, stride): writes a block, zeros past k, vectors `stride` elements apart
//   unpack_b(row, block, to, stride): and returns by how much sums are too large, lane by lane
//   a_scale(row, block), b_scale(row, block), if kScaled: the latter of kColumns rows of b alike
//   ask_b(row, block): for what unpack_b reads later
//   of_columns(column, count): what store wants to know of kColumns columns, the first `count` of which are there
//   store(row, column, count, sums, of_columns)
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "gemm/quick_pairs_cpu.h"

namespace pykv::PYKV_ISA {

constexpr int kBlock = 128;                              // of k
constexpr int kColumns = kWidth == 16 ? 8 : 4;           // of the result, and
constexpr int kTileRows = 3;                             // rows of it that are summed together
constexpr int64_t kMostRows = 126, kRowBytes = 1 << 20;  // of a, at a time

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
#endif

// Runs with<Way>() of what is exact in bf16.
template <class With>
void in_quickest_way(With with) {
#if defined(__AVX512BF16__)
  if (has_quick_pairs()) return with.template operator()<PairWay>();
#endif
  with.template operator()<FloatWay>();
}

// Of lanes kStride apart: sums of a where kStride is not in the lane's number, else of b.
template <int kStride, class V>
[[gnu::always_inline]] inline V sums_of_pairs(V a, V b) {
  return [&]<int... kAt>(std::integer_sequence<int, kAt...>) __attribute__((always_inline)) {
    constexpr auto of = [](int lane) { return static_cast<uint32_t>(lane & kStride ? kWidth : 0); };
    const Words own = {(of(kAt) + kAt)...}, other = {(of(kAt) + (kAt ^ kStride))...};
    return shuffle(a, b, own) + shuffle(a, b, other);
  }(std::make_integer_sequence<int, kWidth>{});
}

// Sums of the lanes of each vector, side by side in the first lanes.
template <int kStride = 1, int kCount, class V>
[[gnu::always_inline]] inline V sums_of_lanes(V (&v)[kCount]) {
  if constexpr (kStride == kWidth) {
    return v[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < (kCount + 2 * kStride - 1) / (2 * kStride); ++i)
      v[i] = sums_of_pairs<kStride>(v[2 * i % kCount], v[(2 * i + 1) % kCount * (kStride < kCount)]);
    return sums_of_lanes<2 * kStride>(v);
  }
}

// To `count` of kColumns neighbours.
template <class T>
[[gnu::always_inline]] inline void store_columns(T* to, Floats v, int count) {
  T some[kWidth];
  store(some, v);
  if (count == kColumns) {
    __builtin_memcpy(to, some, kColumns * sizeof(T));
  } else {
    for (int c = 0; c < count; ++c) to[c] = some[c];
  }
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
    if (Problem::kScaled) a_scales_.resize(static_cast<size_t>(std::min(most, p_.m) * blocks_));
    for (first_ = 0; first_ < p_.m; first_ += most) {
      count_ = std::min(most, p_.m - first_);
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
    const int64_t tile = r / kTileRows * kTileRows, rows = std::min<int64_t>(kTileRows, count_ - tile);
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t piece = block / kBlocks * kBlocks;
      if constexpr (Problem::kScaled)
        a_scales_[static_cast<size_t>(r * blocks_ + block)] = p_.a_scale(first_ + r, block);
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
          if (const int64_t later = block + i + kBlocks; later < blocks_) {
            p_.ask_b(column + std::min(c, count - 1), later);
          } else if (column + kColumns + c < p_.n) {
            p_.ask_b(column + kColumns + c, later % kBlocks);
          }
          const Sum excess = p_.unpack_b(column + std::min(c, count - 1), block + i,
                                         panel.b + (i * kBlock * kColumns + c * Way::kStep), kColumns * Way::kStep);
          if constexpr (Way::kExcess) {
            Sum& of_column = panel.excess[Problem::kScaled ? i : 0][c];
            of_column = Problem::kScaled ? excess : of_column + excess;
          }
        }
      int64_t r = 0;
      for (; r + kTileRows <= count_; r += kTileRows) multiply<kTileRows>(panel, r, block, here);
      if (count_ - r == 2) multiply<2>(panel, r, block, here);
      if (count_ - r == 1) multiply<1>(panel, r, block, here);
    }
    const auto columns = p_.of_columns(column, count);
    for (int64_t r = 0; r < count_; ++r) {
      Total sums[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        sums[c] = panel.totals[r][c];
        if constexpr (Way::kExcess && !Problem::kScaled) sums[c] -= panel.excess[0][c];
      }
      p_.store(first_ + r, column, count, sums_of_lanes(sums), columns);
    }
  }

  // Rows from r on, by `here` blocks of k from `block` on.  Scaled sums want as many registers again.  Not inlined: what unpack_b looks
  // codes up in would take registers.
  template <int kRows>
  [[gnu::noinline]] void multiply(Panel& panel, int64_t r, int64_t block, int here) const {
    constexpr int kTogether = Problem::kScaled ? kColumns / 2 : kColumns;
    for (int first = 0; first < kColumns; first += kTogether) {
      const Element* a = tile_at(r, block);
      const Element* b = panel.b + first * Way::kStep;
      const auto each = [](auto with) __attribute__((always_inline)) {
#pragma GCC unroll 3
        for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
          for (int c = 0; c < kTogether; ++c) with(i, c);
      };
      Total totals[kRows][kTogether];
      each([&](int i, int c) { totals[i][c] = panel.totals[r + i][first + c]; });
      for (int of_piece = 0; of_piece < here; ++of_piece) {
        if constexpr (Problem::kScaled) {
          Sum sums[kRows][kTogether];
          each([&](int i, int c) { sums[i][c] = Way::kExcess ? -panel.excess[of_piece][first + c] : Sum{}; });
          add_block(a, b, sums);
          const float *const of_a = a_scales_.data() + r * blocks_ + block + of_piece, of_b = panel.scale[of_piece];
          Floats scales[kRows];
#pragma GCC unroll 3
          for (int i = 0; i < kRows; ++i) scales[i] = splat(of_a[i * blocks_] * of_b);
          each([&](int i, int c) { totals[i][c] += scales[i] * __builtin_convertvector(sums[i][c], Floats); });
        } else {
          add_block(a, b, totals);
        }
      }
      each([&](int i, int c) { panel.totals[r + i][first + c] = totals[i][c]; });
    }
  }

  template <int kRows, int kTogether>
  [[gnu::always_inline]] static void add_block(const Element*& a, const Element*& b, Sum (&sums)[kRows][kTogether]) {
#pragma GCC unroll 1
    for (int step = 0; step < kSteps; ++step, a += kRows * Way::kStep, b += kColumns * Way::kStep) {
      typename Way::Vector of_a[kRows];
#pragma GCC unroll 3
      for (int i = 0; i < kRows; ++i) of_a[i] = load_raw<typename Way::Vector>(a + i * Way::kStep);
#pragma GCC unroll 8
      for (int c = 0; c < kTogether; ++c) {
        auto of_b = load_raw<typename Way::Vector>(b + c * Way::kStep);
#if defined(__AVX2__)
        if (kRows > 1) asm("" : "+v"(of_b));  // GCC would load it for each row
#endif
#pragma GCC unroll 3
        for (int i = 0; i < kRows; ++i) sums[i][c] = Way::add(sums[i][c], of_a[i], of_b);
      }
    }
  }

  const Problem& p_;
  const int64_t blocks_;
  int64_t first_ = 0, count_ = 0;  // rows of a that are unpacked
  std::vector<Element> a_;
  std::vector<float> a_scales_;  // [row][block], if kScaled
};

}  // namespace pykv::PYKV_ISA
