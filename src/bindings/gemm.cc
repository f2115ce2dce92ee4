#include "pykv/gemm.h"

#include "op.h"

void bind_gemm(Module& m) {
  m.def<pykv_packed_gemm>("packed_gemm");
  m.def<pykv_cutlass_scaled_mm>("cutlass_scaled_mm");
  m.def<pykv_cutlass_scaled_mm_azp>("cutlass_scaled_mm_azp");
}
