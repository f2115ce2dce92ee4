// Which rows an activation computes: all, or the first ones of each expert.
#pragma once

#include "core/args.h"

namespace pykv {

// Rows [e * rows, (e + 1) * rows) belong to expert e, which has counts[e] tokens: rows behind them are left as they are.
struct RowMask {
  Index counts;  // data null: all rows are computed
  int64_t rows;

  PYKV_HOST_DEVICE bool has(int64_t row) const { return !counts.data || row % rows < counts[row / rows]; }
};

}  // namespace pykv
