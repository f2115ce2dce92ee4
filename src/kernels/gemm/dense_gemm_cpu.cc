// Twin of dense_gemm.cu.
#include "gemm/dense_gemm.h"
#include "gemm/float_rows_cpu.h"

namespace pykv::PYKV_ISA {

void dense_gemm_cpu(const DenseGemmArgs& args, const Launch&) {
  const auto unpack = [&](DType dtype, const void* data, int64_t at, int64_t step, float* to) {
    dispatch<float, f16, bf16>(dtype, [&]<class T>() {
      const T* const from = static_cast<const T*>(data) + at;
      int64_t i = 0;
      for (; step == 1 && i + kWidth <= args.k; i += kWidth) store(to + i, load(from + i));
      for (; i < args.k; ++i) to[i] = to_float(from[i * step]);
    });
  };
  multiply_floats(
      args.m, args.n, args.k,
      [&](int64_t row, float* to) { unpack(args.a_dtype, args.a, row * args.a_stride, args.a_step, to); },
      [&](int64_t row, float* to) { unpack(args.b_dtype, args.b, row * args.b_stride, args.b_step, to); },
      [&](int64_t row, int64_t column, float sum) {
        dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
          static_cast<T*>(args.out)[row * args.out_stride + column] = from_float<T>(sum);
        });
      });
}

}  // namespace pykv::PYKV_ISA
