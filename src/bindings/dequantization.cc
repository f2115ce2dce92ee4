#include "pykv/dequantization.h"

#include "op.h"

void bind_dequantization(Module& m) {
  m.def<pykv_ggml_dequantize>("ggml_dequantize");
  m.def<pykv_awq_dequantize>("awq_dequantize");
  m.def<pykv_gptq_dequantize>("gptq_dequantize");
}
