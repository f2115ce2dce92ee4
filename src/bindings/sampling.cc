#include "pykv/sampling.h"

#include "op.h"

void bind_sampling(Module& m) {
  m.def<pykv_apply_penalties_>("apply_penalties_");
  m.def<pykv_apply_repetition_penalties_>("apply_repetition_penalties_");
  m.def<pykv_finish_logits_>("finish_logits_");
  m.def<pykv_merge_top_k>("merge_top_k");
  m.def<pykv_rejection_sample>("rejection_sample");
  m.def<pykv_sample>("sample");
  m.def<pykv_softmax>("softmax");
  m.def<pykv_token_logprobs>("token_logprobs");
  m.def<pykv_top_k_top_p_mask>("top_k_top_p_mask");
  m.def<pykv_top_k_top_p_renorm>("top_k_top_p_renorm");
  m.def<pykv_top_k_per_row>("top_k_per_row");
}
