#include "pykv/cache.h"

#include "op.h"

void bind_cache(Module& m) {
  m.def<pykv_reshape_and_cache>("reshape_and_cache");
  m.def<pykv_reshape_and_cache_flash>("reshape_and_cache_flash");
  m.def<pykv_rotary_and_cache>("rotary_and_cache");
  m.def<pykv_fused_qknorm_rope_cache>("fused_qknorm_rope_cache");
  m.def<pykv_copy_blocks>("copy_blocks");
  m.def<pykv_swap_blocks>("swap_blocks");
  m.def<pykv_swap_blocks_layers>("swap_blocks_layers");
  m.def<pykv_swap_blocks_batch>("swap_blocks_batch");
  m.def<pykv_concat_and_cache_mla>("concat_and_cache_mla");
  m.def<pykv_concat_and_cache_mla_layers>("concat_and_cache_mla_layers");
  m.def<pykv_concat_and_cache_mla_grouped>("concat_and_cache_mla_grouped");
  m.def<pykv_concat_and_cache_mla_rope_fused>("concat_and_cache_mla_rope_fused");
  m.def<pykv_cp_gather_cache>("cp_gather_cache");
  m.def<pykv_gather_and_maybe_dequant_cache>("gather_and_maybe_dequant_cache");
  m.def<pykv_cp_gather_and_upconvert_fp8_kv_cache>("cp_gather_and_upconvert_fp8_kv_cache");
  m.def<pykv_cp_gather_and_upconvert_nvfp4_kv_cache>("cp_gather_and_upconvert_nvfp4_kv_cache");
  m.def<pykv_indexer_k_quant_and_cache>("indexer_k_quant_and_cache");
  m.def<pykv_cp_gather_indexer_k_quant_cache>("cp_gather_indexer_k_quant_cache");
  m.def<pykv_convert_fp8>("convert_fp8");
  m.def<pykv_concat_mla_q>("concat_mla_q");
  m.def<pykv_copy_blocks_mla>("copy_blocks_mla");
}
