#include "norm/rms_norm_static_quant.h"

#include "pykv/norm.h"

namespace pykv {
namespace {

void quantise(Call& call, DLTensor* result, const DLTensor* input, DLTensor* residual, bool with_residual,
              const DLTensor* weight, const DLTensor* scale, double epsilon, void* stream) {
  Dim hidden_size{"hidden_size"};
  const Tensor x = norm_input(call, input, hidden_size);
  const Tensor q = norm_codes(call, "result", result, x, {DType::kFloat8E4M3, DType::kUInt8});
  RmsNormStaticQuantArgs args{};
  if (with_residual) set_residual(args, norm_residual(call, residual, x, q));
  set_rows(args, x, q, row_weights(call, "weight", weight, x, hidden_size), epsilon);
  args.scale = call.parameter("scale", scale);
  if (args.num_rows == 0) return;
  call.run(stream, args, rms_norm_static_quant_cpu, PYKV_CUDA(rms_norm_static_quant_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_rms_norm_static_fp8_quant(DLTensor* result, const DLTensor* input, const DLTensor* weight,
                                           const DLTensor* scale, double epsilon, void* stream) {
  return guarded("rms_norm_static_fp8_quant",
                 [&](Call& call) { quantise(call, result, input, nullptr, false, weight, scale, epsilon, stream); });
}

pykv_status pykv_fused_add_rms_norm_static_fp8_quant(DLTensor* result, const DLTensor* input, DLTensor* residual,
                                                     const DLTensor* weight, const DLTensor* scale, double epsilon,
                                                     void* stream) {
  return guarded("fused_add_rms_norm_static_fp8_quant",
                 [&](Call& call) { quantise(call, result, input, residual, true, weight, scale, epsilon, stream); });
}
