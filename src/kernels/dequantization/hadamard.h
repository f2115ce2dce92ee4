// Hadamard matrices of the orders that rotations of weights use beside powers of two: of n = m 2^k the transform is the matrix of
// order m times (Kronecker) Sylvester's of order 2^k.
//
// 12 and 40 are Paley's (of q = 5, second construction; of q = 19, first one, doubled), 20 and 28 Williamson's: four by four
// circulant blocks.  These are the ones of the usual libraries, so that weights they have rotated fit.
#pragma once

#include <cstdint>

#include "core/launch.h"

namespace pykv {

inline constexpr int kHadamardOrders[] = {40, 28, 20, 12};  // 40 before 20, where both would do

// First rows of the blocks; a bit is a minus.
inline constexpr uint8_t kWilliamson20[16] = {0x1e, 0x1e, 0x0c, 0x12, 0x01, 0x1e, 0x0d, 0x0c,
                                              0x13, 0x12, 0x1e, 0x01, 0x0d, 0x13, 0x1e, 0x1e};
inline constexpr uint8_t kWilliamson28[16] = {0x7e, 0x3c, 0x5a, 0x66, 0x43, 0x7e, 0x19, 0x5a,
                                              0x25, 0x66, 0x7e, 0x43, 0x19, 0x25, 0x3c, 0x7e};

constexpr bool is_square(int number, int prime) {  // modulo the prime; 0 is none
  for (int i = 1; i < prime; ++i)
    if (i * i % prime == (number % prime + prime) % prime) return true;
  return false;
}

// Whether the element is -1, not 1.
constexpr bool hadamard_minus(int order, int row, int column) {
  if (order == 1) return false;
  if (order == 12) {
    const int i = row / 2, j = column / 2, both = row % 2 + column % 2;
    if (i == j) return both > 0;
    const bool minus = i > 0 && j > 0 && !is_square(j - i, 5);
    return minus != (both == 2);
  }
  if (order == 40) {
    const int i = row % 20, j = column % 20;
    const bool minus = j > 0 && (i == 0 || is_square(j - i, 19));
    return minus != (row >= 20 && column >= 20);
  }
  const int size = order / 4;
  const uint8_t first = (order == 20 ? kWilliamson20 : kWilliamson28)[row / size * 4 + column / size];
  return first >> ((column - row) % size + size) % size & 1;
}

// The signs of a row, a bit for each column.
template <int kOrder>
struct HadamardSigns {
  uint64_t rows[kOrder];
  constexpr HadamardSigns() : rows{} {
    for (int i = 0; i < kOrder; ++i)
      for (int j = 0; j < kOrder; ++j) rows[i] |= static_cast<uint64_t>(hadamard_minus(kOrder, i, j)) << j;
  }
};

}  // namespace pykv
