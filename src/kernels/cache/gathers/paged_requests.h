// Which token of a paged cache belongs into row i of a gathered array.
#pragma once

#include "core/args.h"

namespace pykv {

// "op: argument" of each id that may be out of range.
struct PagedReports {
  const char *request, *position, *block;
  const char* start;
};

// Requests lie one after another in the gathered rows; optional arrays have null data.
struct PagedRequests {
  PagedReports reports;
  Index starts;                       // [num_requests + 1]: the first row of each, and the end of the last
  bool open_end = false;              // starts has no end of the last request: it has all rows that follow
  Index positions;                    // the position of its first row in the sequence; without: 0
  Index request_of;                   // the request of each row; without: it is searched for in starts
  Index blocks;                       // block table [num_requests, table_width], stride 1
  int64_t blocks_row, blocks_column;  // its strides
  int64_t num_requests, table_width, num_blocks, block_size;

  struct Place {
    int64_t block, offset;  // block -1: none
    int64_t run;            // so many rows, this one and the next, lie one after another from here on in the block
  };

  // None for a row that no request has; none, and a report, where an id is out of range.  Inlined by force: it is compiled
  // for several instruction sets, and must not become a symbol that they share.
  PYKV_HOST_DEVICE __attribute__((always_inline)) inline Place locate(int64_t row, ErrorWord* errors) const {
    return locate(row, 0, num_requests, errors);
  }

  // The same where the row's request is known to be in [request, end), unless request_of says which it is.
  PYKV_HOST_DEVICE __attribute__((always_inline)) inline Place locate(int64_t row, int64_t request, int64_t end,
                                                                      ErrorWord* errors) const {
    constexpr Place kNone{-1, 0, 1};
    const auto report = [&](const char* what, int64_t value, int64_t bound) {
      Reporter{errors, what}(value, bound);
      return kNone;
    };
    if (request_of.data) {
      request = request_of[row];
      if (request < 0 || request >= num_requests) return report(reports.request, request, num_requests);
    } else {  // the last that starts here or before; empty ones before it start here too
      while (end - request > 1) {
        const int64_t middle = request + (end - request) / 2;
        if (starts[middle] <= row) {
          request = middle;
        } else {
          end = middle;
        }
      }
    }
    const int64_t start = starts[request];
    if (row < start) return kNone;
    // unsigned: ids may be anything
    const uint64_t in_request = static_cast<uint64_t>(row) - static_cast<uint64_t>(start);
    const int64_t next = open_end && request == num_requests - 1 ? INT64_MAX : starts[request + 1];
    if (row >= next) return kNone;
    const int64_t rest = next - row;  // rows of the request from this one on
    const int64_t position =
        static_cast<int64_t>(in_request + (positions.data ? static_cast<uint64_t>(positions[request]) : uint64_t{0}));
    if (position < 0 || position / block_size >= table_width)
      return report(reports.position, position, table_width * block_size);
    const int64_t block = blocks[request * blocks_row + position / block_size * blocks_column];
    if (block < 0 || block >= num_blocks) return report(reports.block, block, num_blocks);
    const int64_t offset = position % block_size, in_block = block_size - offset;
    return {block, offset, request_of.data ? 1 : rest < in_block ? rest : in_block};
  }

  // Reports starts that descend, and such as lie beyond the rows that there are to gather into.  Looks at each `step`th from
  // `first` on.
  PYKV_HOST_DEVICE __attribute__((always_inline)) inline void check_starts(int64_t num_rows, int64_t first,
                                                                           int64_t step, ErrorWord* errors) const {
    const Reporter report{errors, reports.start};
    const int64_t last = open_end ? num_requests - 1 : num_requests;
    for (int64_t i = first; i <= last; i += step) {
      const int64_t start = starts[i], next = i < last ? starts[i + 1] : num_rows;
      if (start < 0 || start > num_rows) {
        report(start, num_rows + 1);
      } else if (next >= 0 && start > next) {  // a negative one is reported itself
        report(start, next + 1);
      }
    }
  }
};

}  // namespace pykv
