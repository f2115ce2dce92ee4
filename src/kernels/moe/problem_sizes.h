// Sizes of the problems of two grouped GEMMs, one of each for an expert, from the rows that experts have.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "moe/sort_pairs.h"

namespace pykv {

struct ProblemSizesArgs {
  Index counts;                    // rows of each expert; data null: they follow from
  Index offsets;                   // [num_experts + 1]: where each expert's rows begin
  int32_t *problems1, *problems2;  // [num_experts, 3]
  int32_t* begins;                 // [num_begins]: e * rows_of_expert; null: not wanted
  int64_t num_begins, rows_of_expert;
  int64_t num_experts, columns, hidden, inner;
  bool is_swapped;

  PYKV_HOST_DEVICE __attribute__((always_inline)) void put(int64_t e) const {
    if (e < num_begins) begins[e] = static_cast<int32_t>(e * rows_of_expert);
    if (e >= num_experts) return;
    // offsets may be any numbers: their difference may wrap
    const int64_t rows =
        counts.data ? counts[e]
                    : static_cast<int64_t>(static_cast<uint64_t>(offsets[e + 1]) - static_cast<uint64_t>(offsets[e]));
    put_problem(problems1 + 3 * e, rows, columns, hidden, is_swapped);
    put_problem(problems2 + 3 * e, rows, hidden, inner, is_swapped);
  }
};

PYKV_CPU_TWIN(problem_sizes_cpu, ProblemSizesArgs)
void problem_sizes_cuda(const ProblemSizesArgs& args, const Launch& launch);

}  // namespace pykv
