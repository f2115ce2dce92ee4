// Penalties of tokens that occur, in place.  The idea behind pykv_apply_repetition_penalties_.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct RepetitionPenaltiesArgs {
  DType dtype, penalty_dtype;

  void* logits;  // [num_rows, num_cols]
  const uint8_t *prompt_mask, *output_mask;
  const void* penalties;                               // [num_rows]
  int64_t logit_stride, prompt_stride, output_stride;  // elements between rows
  int64_t penalty_stride;

  int64_t num_rows, num_cols;
};

PYKV_CPU_TWIN(apply_repetition_penalties_cpu, RepetitionPenaltiesArgs)
void apply_repetition_penalties_cuda(const RepetitionPenaltiesArgs& args, const Launch& launch);

}  // namespace pykv
