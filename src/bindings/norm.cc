#include "pykv/norm.h"

#include "op.h"

void bind_norm(Module& m) {
  m.def<pykv_rms_norm>("rms_norm");
  m.def<pykv_fused_add_rms_norm>("fused_add_rms_norm");
  m.def<pykv_gemma_rms_norm>("gemma_rms_norm");
  m.def<pykv_gemma_fused_add_rms_norm>("gemma_fused_add_rms_norm");
  m.def<pykv_layer_norm>("layer_norm");
  m.def<pykv_rms_norm_gated>("rms_norm_gated");
  m.def<pykv_rms_norm_static_fp8_quant>("rms_norm_static_fp8_quant");
  m.def<pykv_fused_add_rms_norm_static_fp8_quant>("fused_add_rms_norm_static_fp8_quant");
  m.def<pykv_rms_norm_dynamic_per_token_quant>("rms_norm_dynamic_per_token_quant");
  m.def<pykv_rms_norm_per_block_quant>("rms_norm_per_block_quant");
  m.def<pykv_fused_qk_norm_rope>("fused_qk_norm_rope");
}
