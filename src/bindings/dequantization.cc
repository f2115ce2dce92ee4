#include "pykv/dequantization.h"

#include "op.h"

void bind_dequantization(Module& m) {
  m.def<pykv_ggml_dequantize>("ggml_dequantize");
  m.def<pykv_awq_dequantize>("awq_dequantize");
  m.def<pykv_gptq_dequantize>("gptq_dequantize");
  m.def<pykv_fp8_dequantize>("fp8_dequantize");
  m.def<pykv_mxfp8_dequantize>("mxfp8_dequantize");
  m.def<pykv_mxfp4_dequantize>("mxfp4_dequantize");
  m.def<pykv_nvfp4_dequantize>("nvfp4_dequantize");
  m.def<pykv_permute_cols>("permute_cols");
  m.def<pykv_hadacore_transform>("hadacore_transform");
}
