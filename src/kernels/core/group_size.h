// Sizes of groups that share a scale.
#pragma once

#include <algorithm>
#include <cinttypes>

#include "core/error.h"

namespace pykv {

// How many rows, or columns, of `size` a group has: what is given; all, where that is -1; or where it is 0 what divides them evenly
// into so many groups.
inline int64_t group_size(const char* name, int64_t given, int64_t size, int64_t groups) {
  if (given < -1)
    fail(PYKV_VALUE_ERROR, "%s: must be positive, -1 (all) or 0 (what divides evenly), got %" PRId64, name, given);
  if (given == -1) return std::max<int64_t>(size, 1);
  if (given > 0) return std::min(given, std::max<int64_t>(size, 1));
  if (groups == 0 || size % groups != 0)
    fail(PYKV_VALUE_ERROR, "%s: is required, for %" PRId64 " scales do not divide %" PRId64 " evenly", name, groups,
         size);
  return std::max<int64_t>(size / groups, 1);
}

}  // namespace pykv
