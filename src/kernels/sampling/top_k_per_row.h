// The largest logits of each row.  The idea behind pykv_top_k_per_row.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "sampling/logit_order.h"

namespace pykv {

// A list of ids that may be left out.
struct OptionalIndex {
  Index list;  // data is null: none
  PYKV_HOST_DEVICE int64_t at(int64_t i, int64_t otherwise) const { return list.data ? list[i] : otherwise; }
};

struct TopKPerRowArgs {
  DType dtype;

  int32_t* indices;    // [num_rows, k]
  const void* logits;  // [num_rows, num_cols]
  void* values;        // [num_rows, k]; null: not wanted
  int64_t index_stride, logit_stride, value_stride;

  OptionalIndex starts, ends, row_k;
  int64_t next_n;  // 0: one end for each row

  int64_t num_rows;
  int32_t num_cols, k;
  bool sorted;

  PYKV_HOST_DEVICE int64_t stated_end(int64_t row) const {
    if (next_n == 0) return ends.at(row, num_cols);
    const int64_t end = ends.list[row / next_n];  // near the ends of int64 the difference would wrap
    return end <= 0 ? end : end - next_n + row % next_n + 1;
  }
};

struct RowRange {
  int32_t begin, size, k;  // columns, and how many are wanted: at most `size`
};

// That of a row; what has to be clamped is told to report(argument, value, bound).
enum class RowArgument { kStarts, kEnds, kRowK };
inline constexpr const char* kRowArguments[] = {"top_k_per_row: row_starts", "top_k_per_row: row_ends",
                                                "top_k_per_row: row_k"};
template <class Report>
PYKV_HOST_DEVICE static inline RowRange range_of_row(const TopKPerRowArgs& args, int64_t row, Report report) {
  const int64_t cols = args.num_cols, start = args.starts.at(row, 0), end = args.stated_end(row);
  const int64_t k = args.row_k.at(row, args.k);
  if (start < 0 || start > cols) report(RowArgument::kStarts, start, cols + 1);
  if (end > cols) report(RowArgument::kEnds, end, cols + 1);
  if (k < 0 || k > args.k) report(RowArgument::kRowK, k, int64_t{args.k} + 1);
  const int64_t begin = start < 0 ? 0 : start < cols ? start : cols;
  const int64_t size = (end < begin ? begin : end < cols ? end : cols) - begin;
  const int64_t wanted = k < 0 ? 0 : k < args.k ? k : args.k;
  return {static_cast<int32_t>(begin), static_cast<int32_t>(size), static_cast<int32_t>(wanted < size ? wanted : size)};
}

PYKV_CPU_TWIN(top_k_per_row_cpu, TopKPerRowArgs)
void top_k_per_row_cuda(const TopKPerRowArgs& args, const Launch& launch);

}  // namespace pykv
