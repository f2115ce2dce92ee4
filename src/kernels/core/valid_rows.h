// Which rows an operation computes, where numbers in memory say it.  These may be any; other rows are left as they are.
#pragma once

#include "core/args.h"

namespace pykv {

// A count of rows, of which there are so many.
PYKV_HOST_DEVICE constexpr int64_t bounded_count(int64_t count, int64_t rows) {
  return count < 0 ? 0 : count < rows ? count : rows;
}

// The first rows, as many as one number says; null: all.
struct RowCount {
  const int32_t* data;

  PYKV_HOST_DEVICE int64_t of(int64_t rows) const { return data ? bounded_count(*data, rows) : rows; }
};

// Of each `rows` neighbours, such as those of an expert, the first counts[i] * factor; null: all.
struct ValidRows {
  Index counts;
  int64_t rows;
  int64_t factor;  // at most `rows`

  // How many these are by one of the counts.
  PYKV_HOST_DEVICE int64_t rows_of(int64_t count) const {
    return bounded_count(count, rows) * factor;  // which does not wrap
  }
  PYKV_HOST_DEVICE bool has(int64_t row) const { return !counts.data || row % rows < rows_of(counts[row / rows]); }
};

// Of each `rows` neighbours the first counts[i] (null: all) that have a place.
struct RowMask {
  Index counts;
  int64_t rows;
  const int32_t* places = nullptr;  // of each row, negative: none; null: all have one

  PYKV_HOST_DEVICE bool has(int64_t row) const {
    if (places && places[row] < 0) return false;
    return !counts.data || row % rows < counts[row / rows];
  }
};

}  // namespace pykv
