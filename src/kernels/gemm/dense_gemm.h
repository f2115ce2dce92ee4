// out = a b^T for few rows of a, in fp32: the small products of a router, and of the first projection of an MLA layer.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"

namespace pykv {

struct DenseGemmArgs {
  DType a_dtype;  // float16, bfloat16, or float32 like b
  DType b_dtype;  // the same, or float32
  DType out_dtype;
  const void *a, *b;  // [m, k], [n, k]
  void* out;          // [m, n]
  int64_t m, n, k;
  int64_t a_stride, b_stride, out_stride;  // of rows
  int64_t a_step, b_step;                  // from an element of a row to the next
};

PYKV_CPU_TWIN_OF_PRODUCTS(dense_gemm_cpu, DenseGemmArgs)
void dense_gemm_cuda(const DenseGemmArgs& args, const Launch& launch);

}  // namespace pykv
