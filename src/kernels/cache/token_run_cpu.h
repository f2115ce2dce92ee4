// Neighbouring tokens of a call, as far as their slots are neighbours, too.
#pragma once

#include <algorithm>

#include "cache/reshape_and_cache.h"

namespace pykv::PYKV_ISA {

// `length` tokens in consecutive slots of one block.
struct Run {
  int64_t token, length, block, offset;
};

// While a row of so many elements is converted, that of so many tokens later is asked for: the processor itself does not look
// far enough ahead through the arithmetic.  Mostly it is a row that comes soon.
template <class T>
constexpr int64_t rows_ahead(int64_t row) {
  constexpr int64_t kBytes = 4096;
  const int64_t bytes = std::max<int64_t>(row, 1) * static_cast<int64_t>(sizeof(T));
  return (kBytes + bytes - 1) / bytes;
}

}  // namespace pykv::PYKV_ISA
