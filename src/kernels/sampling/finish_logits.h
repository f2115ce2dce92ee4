// What follows the product of a head, in place.  The idea behind pykv_finish_logits_.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct FinishLogitsArgs {
  DType dtype;

  void* logits;  // [num_rows, num_cols]
  int64_t logit_stride;
  int64_t first_pad, end_of_pad,
      first_unused;       // columns: those between, and those from the last one on, belong to no token
  float soft_cap, scale;  // 0: no cap

  int64_t num_rows, num_cols;

  bool computes() const { return soft_cap != 0.0f || scale != 1.0f; }
  // Inlined by force: it must not be a symbol that CPU twins share.
  PYKV_HOST_DEVICE __attribute__((always_inline)) bool is_token(int64_t column) const {
    return column < first_pad || (column >= end_of_pad && column < first_unused);
  }
};

PYKV_CPU_TWIN(finish_logits_cpu, FinishLogitsArgs)
void finish_logits_cuda(const FinishLogitsArgs& args, const Launch& launch);

}  // namespace pykv
