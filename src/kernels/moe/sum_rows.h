// out[t] = the sum of weight(t, j) * row(t, j) over j, in fp32 and in this order, rounded once: the idea behind moe_sum and
// moe_unpermute.
#pragma once

#include "cpu/isa.h"
#include "moe/sort_pairs.h"

namespace pykv {

struct SumRowsArgs {
  DType dtype;
  const void* rows;
  int64_t token_stride, row_stride;  // elements: row (t, j) is at t * token_stride + j * row_stride
  void* out;
  int64_t out_stride;
  int64_t num_tokens, top_k, width;

  const float* weights;  // [num_tokens, top_k]; null: 1
  int64_t weights_token_stride, weights_stride;

  PairIds places;  // data not null: row (t, j) is at places.at(t, j) * row_stride; negative: there is none
  int64_t num_rows;
  PairIds num_valid;  // one number: from there on there is none either; data null: all rows count

  PairIds ids;       // data not null: there is no row where the id of an expert is negative
  Index expert_map;  // or is negative by this; data null: as it is
  int64_t num_experts;

  bool numbers_are_old;  // places, ids and weights: the kernel before this one has waited for them

  const char *report_places, *report_ids;

  // What says where row (t, j) is, or whether: a place or an id; 0 where there is neither.
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t number_of(int64_t t, int64_t j) const {
    return places.data ? places.at(t, j) : ids.data ? ids.at(t, j) : 0;
  }
  // Numbers from here on are out of range, and those that are places have no row from num_valid on.
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t bound() const {
    return places.data ? num_rows : expert_map.data ? num_experts : INT64_MAX;
  }
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t end_of_places() const {
    return places.data && num_valid.data ? num_valid.at(0) : INT64_MAX;
  }
  PYKV_HOST_DEVICE __attribute__((always_inline)) const char* report_of() const {
    return places.data ? report_places : report_ids;
  }
  static constexpr int64_t kNoRow = INT64_MIN;  // rows may lie backwards, before the first
  // Where the row begins, in elements, or kNoRow.
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t begin_of(int64_t t, int64_t j, int64_t number,
                                                                   int64_t end) const {
    const bool is_there = number >= 0 && number < end && number < bound();
    if (places.data) return is_there ? number * row_stride : kNoRow;
    const bool is_here = is_there && (!expert_map.data || expert_map[number] >= 0);
    return is_here ? t * token_stride + j * row_stride : kNoRow;
  }
};

PYKV_CPU_TWIN(sum_rows_cpu, SumRowsArgs)
void sum_rows_cuda(const SumRowsArgs& args, const Launch& launch);

}  // namespace pykv
