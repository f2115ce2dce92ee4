// How many of some rows are there.
#pragma once

#include "core/args.h"

namespace pykv {

// The first ones: as many as a number in device memory says, which may be any; null: all.
struct RowCount {
  const int32_t* data;

  PYKV_HOST_DEVICE int64_t of(int64_t rows) const {
    if (!data) return rows;
    const int64_t count = *data;
    return count < 0 ? 0 : count < rows ? count : rows;
  }
};

}  // namespace pykv
