#include "pykv/gemm.h"

#include "op.h"

void bind_gemm(Module& m) { m.def<pykv_packed_gemm>("packed_gemm"); }
