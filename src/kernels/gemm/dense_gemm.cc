#include "gemm/dense_gemm.h"

#include "core/call.h"
#include "pykv/gemm.h"

namespace pykv {
namespace {

// b: [n, k], or [k, n] if `transposed`.
void multiply(Call& call, DLTensor* output, const char* a_name, const DLTensor* a, const char* b_name,
              const DLTensor* b, bool transposed, bool wide_b, std::initializer_list<DType> out_types, void* stream) {
  DenseGemmArgs args{};
  Dim m{"num_rows"}, n{"n"}, k{"k"};
  Tensor rows = call.read(a_name, a);
  if (wide_b) {
    rows.dtype(kFloats);
  } else {
    rows.dtype({DType::kBFloat16, DType::kFloat16});
  }
  rows.shape(m, k);
  Tensor weight = call.read(b_name, b);
  if (wide_b) {
    weight.dtype({DType::kFloat32});
  } else {
    weight.like(rows);
  }
  const int along_k = transposed ? 0 : 1;
  weight.rank(2).dim(along_k, k).dim(1 - along_k, n);
  const Tensor out = call.write("output", output).dtype(out_types).shape(m, n).contiguous_rows().no_overlap_within();
  args.a_dtype = rows.type();
  args.b_dtype = weight.type();
  args.out_dtype = out.type();
  args.a = rows.data();
  args.b = weight.data();
  args.out = out.data();
  args.m = m;
  args.n = n;
  args.k = k;
  args.a_stride = rows.stride(0);
  args.a_step = rows.stride(1);
  args.b_stride = weight.stride(1 - along_k);
  args.b_step = weight.stride(along_k);
  args.out_stride = out.stride(0);
  if (args.m == 0 || args.n == 0) return;
  call.run(stream, args, dense_gemm_cpu, PYKV_CUDA(dense_gemm_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_dsv3_fused_a_gemm(DLTensor* output, const DLTensor* mat_a, const DLTensor* mat_b, void* stream) {
  return guarded("dsv3_fused_a_gemm", [&](Call& call) {
    multiply(call, output, "mat_a", mat_a, "mat_b", mat_b, true, false, kFloats, stream);
  });
}

pykv_status pykv_dsv3_router_gemm(DLTensor* output, const DLTensor* hidden_states, const DLTensor* router_weight,
                                  void* stream) {
  return guarded("dsv3_router_gemm", [&](Call& call) {
    multiply(call, output, "hidden_states", hidden_states, "router_weight", router_weight, false, false, kFloats,
             stream);
  });
}

pykv_status pykv_fp32_router_gemm(DLTensor* output, const DLTensor* a, const DLTensor* b, void* stream) {
  return guarded("fp32_router_gemm",
                 [&](Call& call) { multiply(call, output, "a", a, "b", b, false, true, {DType::kFloat32}, stream); });
}
