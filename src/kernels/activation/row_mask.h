// Which rows an activation computes: all, the first ones of each expert, or those that have a place.
#pragma once

#include "core/args.h"

namespace pykv {

// Rows [e * rows, (e + 1) * rows) belong to expert e, which has counts[e] tokens.  Rows behind them, and rows whose place is
// negative, are left as they are.
struct RowMask {
  Index counts;  // data null: all rows are computed
  int64_t rows;
  const int32_t* places = nullptr;  // of each row; null: all have one

  PYKV_HOST_DEVICE bool has(int64_t row) const {
    if (places && places[row] < 0) return false;
    return !counts.data || row % rows < counts[row / rows];
  }
};

}  // namespace pykv
