#include "pykv/gemm.h"

#include "op.h"

void bind_gemm(Module& m) {
  m.def<pykv_packed_gemm>("packed_gemm");
  m.def<pykv_cutlass_scaled_mm>("cutlass_scaled_mm");
  m.def<pykv_cutlass_scaled_mm_azp>("cutlass_scaled_mm_azp");
  m.def<pykv_cutlass_scaled_fp4_mm>("cutlass_scaled_fp4_mm");
  m.def<pykv_dsv3_fused_a_gemm>("dsv3_fused_a_gemm");
  m.def<pykv_dsv3_router_gemm>("dsv3_router_gemm");
  m.def<pykv_fp32_router_gemm>("fp32_router_gemm");
}
