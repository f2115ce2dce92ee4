// Rows in groups, each of which has a weight of its own: what makes of a product one with several weights.
//
// Groups lie one after another, at places of their own, or apart from each other in matrices of m rows each; or they are a
// property of the rows.
#pragma once

#include "core/args.h"

namespace pykv {

struct RowGroups {
  static constexpr int kNeighbours = 128;  // rows that have one group, where rows say which
  static constexpr int kMost = 512;        // groups, whose tiles are counted in a block's shared memory

  int64_t count;          // of groups, and of weights; 0: all rows have one weight
  int64_t expected_rows;  // of a group
  Index of_rows;          // [m]: the group of each row.  data null: one of the others
  Index begins;           // [count]: a group's first row.  data null: groups are apart
  Index sizes;            // [count]: how many rows it has.  data null: up to begins[g + 1]
  Index more;             // [count]: sizes are these together, less `less`.  data null: sizes alone
  int64_t less;
  const char *report_rows, *report_begins;  // "op: argument"

  // Of numbers that may be any: it may wrap.
  PYKV_HOST_DEVICE static int64_t plus(int64_t a, int64_t b, int64_t times = 1) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b) * static_cast<uint64_t>(times));
  }
  PYKV_HOST_DEVICE bool are_apart() const { return count > 0 && !of_rows.data && !begins.data; }

  // The rows [begin, end) of a group, which are told from `rows`; reports what lies outside.
  template <class Report>
  PYKV_HOST_DEVICE void rows_of(int64_t group, int64_t rows, int64_t& begin, int64_t& end, Report&& report) const {
    const int64_t first = begins.data ? begins[group] : 0;
    int64_t size = sizes.data ? sizes[group] : plus(begins[group + 1], first, -1);
    if (more.data) size = plus(size, plus(more[group], less, -1));
    const bool fits = first >= 0 && size >= 0 && first <= rows && size <= rows - first;
    if (!fits) report(first < 0 || size < 0 ? (first < 0 ? first : size) : plus(first, size), rows + 1);
    begin = fits ? first : 0;
    end = fits ? first + size : 0;
  }

  // The group of a row that says so itself, -1: none.
  template <class Report>
  PYKV_HOST_DEVICE int64_t group_of(int64_t row, Report&& report) const {
    const int64_t group = of_rows[row], first = of_rows[row / kNeighbours * kNeighbours];
    if (group >= count || (group >= 0 && group != first)) report(group, count);
    return group >= 0 && group < count && group == first ? group : -1;
  }
};

}  // namespace pykv
