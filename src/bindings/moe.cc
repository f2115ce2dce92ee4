#include "pykv/moe.h"

#include "op.h"

void bind_moe(Module& m) {
  m.def<pykv_topk_softmax>("topk_softmax");
  m.def<pykv_topk_sigmoid>("topk_sigmoid");
  m.def<pykv_topk_softplus_sqrt>("topk_softplus_sqrt");
  m.def<pykv_grouped_topk>("grouped_topk");
  m.def<pykv_moe_align_block_size>("moe_align_block_size");
  m.def<pykv_batched_moe_align_block_size>("batched_moe_align_block_size");
  m.def<pykv_moe_lora_align_block_size>("moe_lora_align_block_size");
  m.def<pykv_get_cutlass_moe_mm_data>("get_cutlass_moe_mm_data");
  m.def<pykv_get_cutlass_moe_mm_problem_sizes_from_expert_offsets>(
      "get_cutlass_moe_mm_problem_sizes_from_expert_offsets");
  m.def<pykv_get_cutlass_batched_moe_mm_data>("get_cutlass_batched_moe_mm_data");
  m.def<pykv_moe_permute>("moe_permute");
  m.def<pykv_moe_unpermute>("moe_unpermute");
  m.def<pykv_moe_sum>("moe_sum");
  m.def<pykv_shuffle_rows>("shuffle_rows");
  m.def<pykv_fused_moe>("fused_moe");
}
