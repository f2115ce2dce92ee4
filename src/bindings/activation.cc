#include "pykv/activation.h"

#include "op.h"

void bind_activation(Module& m) {
  m.def<pykv_silu_and_mul>("silu_and_mul");
  m.def<pykv_silu_and_mul_quant>("silu_and_mul_quant");
  m.def<pykv_silu_and_mul_per_block_quant>("silu_and_mul_per_block_quant");
  m.def<pykv_gelu_tanh_and_mul>("gelu_tanh_and_mul");
  m.def<pykv_mul_and_silu>("mul_and_silu");
  m.def<pykv_silu_and_mul_with_clamp>("silu_and_mul_with_clamp");
  m.def<pykv_gelu_and_mul>("gelu_and_mul");
  m.def<pykv_gelu_and_mul_sparse>("gelu_and_mul_sparse");
  m.def<pykv_fatrelu_and_mul>("fatrelu_and_mul");
  m.def<pykv_swigluoai_and_mul>("swigluoai_and_mul");
  m.def<pykv_swiglustep_and_mul>("swiglustep_and_mul");
  m.def<pykv_situ_and_mul>("situ_and_mul");
  m.def<pykv_masked_moe_activation>("masked_moe_activation");
  m.def<pykv_gelu_new>("gelu_new");
  m.def<pykv_gelu_fast>("gelu_fast");
  m.def<pykv_gelu_quick>("gelu_quick");
  m.def<pykv_relu2>("relu2");
  m.def<pykv_relu_squared>("relu_squared");
  m.def<pykv_xielu>("xielu");
}
