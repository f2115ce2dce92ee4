#include "pykv/quantization.h"

#include "op.h"

void bind_quantization(Module& m) {
  m.def<pykv_static_scaled_int8_quant>("static_scaled_int8_quant");
  m.def<pykv_dynamic_scaled_int8_quant>("dynamic_scaled_int8_quant");
  m.def<pykv_per_token_quant_int8>("per_token_quant_int8");
  m.def<pykv_static_scaled_fp8_quant>("static_scaled_fp8_quant");
  m.def<pykv_dynamic_scaled_fp8_quant>("dynamic_scaled_fp8_quant");
  m.def<pykv_dynamic_per_token_scaled_fp8_quant>("dynamic_per_token_scaled_fp8_quant");
  m.def<pykv_per_token_group_fp8_quant>("per_token_group_fp8_quant");
  m.def<pykv_per_token_group_fp8_quant_packed>("per_token_group_fp8_quant_packed");
  m.def<pykv_per_token_group_quant_int8>("per_token_group_quant_int8");
  m.def<pykv_scaled_fp4_quant>("scaled_fp4_quant");
  m.def<pykv_silu_and_mul_nvfp4_quant>("silu_and_mul_nvfp4_quant");
  m.def<pykv_scaled_fp4_experts_quant>("scaled_fp4_experts_quant");
  m.def<pykv_silu_and_mul_scaled_fp4_experts_quant>("silu_and_mul_scaled_fp4_experts_quant");
  m.def<pykv_mxfp8_quantize>("mxfp8_quantize");
  m.def<pykv_mxfp4_quantize>("mxfp4_quantize");
  m.def<pykv_mxfp4_experts_quant>("mxfp4_experts_quant");
  m.def<pykv_silu_and_mul_mxfp4_experts_quant>("silu_and_mul_mxfp4_experts_quant");
  m.def<pykv_mxfp8_experts_quant>("mxfp8_experts_quant");
  m.def<pykv_situ_and_mul_quant>("situ_and_mul_quant");
  m.def<pykv_persistent_masked_m_silu_mul_quant>("persistent_masked_m_silu_mul_quant");
}
