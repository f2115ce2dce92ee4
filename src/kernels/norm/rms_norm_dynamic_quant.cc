#include "norm/rms_norm_dynamic_quant.h"

#include <cinttypes>

#include "pykv/norm.h"

namespace pykv {
namespace {

// All but the scales and the size of a group.
RmsNormDynamicQuantArgs checked(Call& call, Dim& hidden_size, DLTensor* result, const DLTensor* input,
                                const DLTensor* weight, double epsilon, const DLTensor* scale_ub, DLTensor* residual) {
  const Tensor x = norm_input(call, input, hidden_size);
  const Tensor q = norm_codes(call, "result", result, x, {DType::kFloat8E4M3, DType::kUInt8, DType::kInt8});
  RmsNormDynamicQuantArgs args{};
  args.int8 = q.type() == DType::kInt8;
  set_rows(args, x, q, row_weights(call, "weight", weight, x, hidden_size), epsilon);
  if (residual) set_residual(args, norm_residual(call, residual, x, q));
  if (scale_ub) {
    if (args.int8) fail(PYKV_VALUE_ERROR, "scale_ub: is for fp8 codes, but result is int8");
    args.bounded = true;
    args.scale_ub = call.parameter("scale_ub", scale_ub);
  }
  return args;
}

Tensor scales(Call& call, DLTensor* scale) {
  return call.write("scale", scale).rank_between(1, 2).dtype({DType::kFloat32}).no_overlap_within();
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_rms_norm_dynamic_per_token_quant(DLTensor* result, const DLTensor* input, const DLTensor* weight,
                                                  DLTensor* scale, double epsilon, const DLTensor* scale_ub,
                                                  DLTensor* residual, void* stream) {
  return guarded("rms_norm_dynamic_per_token_quant", [&](Call& call) {
    Dim hidden_size{"hidden_size"};
    RmsNormDynamicQuantArgs args = checked(call, hidden_size, result, input, weight, epsilon, scale_ub, residual);
    Dim num_rows{"num_rows", args.num_rows}, one{"1", 1};
    Tensor s = scales(call, scale);
    if (hidden_size == 0) return;
    s.dim(0, num_rows);
    if (s.ndim() == 2) s.dim(1, one);
    args.scales = static_cast<float*>(s.data());
    args.scale_row = s.stride(0);
    args.group_size = hidden_size;
    args.per_token = true;
    if (args.num_rows == 0) return;
    call.run(stream, args, rms_norm_dynamic_quant_cpu, PYKV_CUDA(rms_norm_dynamic_quant_cuda));
  });
}

pykv_status pykv_rms_norm_per_block_quant(DLTensor* result, const DLTensor* input, const DLTensor* weight,
                                          DLTensor* scale, double epsilon, const DLTensor* scale_ub, DLTensor* residual,
                                          int64_t group_size, bool is_scale_transposed, void* stream) {
  return guarded("rms_norm_per_block_quant", [&](Call& call) {
    Dim hidden_size{"hidden_size"};
    RmsNormDynamicQuantArgs args = checked(call, hidden_size, result, input, weight, epsilon, scale_ub, residual);
    if (group_size <= 0 || hidden_size % group_size != 0)
      fail(PYKV_VALUE_ERROR, "group_size: must divide hidden_size = %" PRId64 ", got %" PRId64,
           static_cast<int64_t>(hidden_size), group_size);
    Dim num_rows{"num_rows", args.num_rows}, num_groups{"hidden_size / group_size", hidden_size / group_size};
    Tensor s = scales(call, scale);
    if (hidden_size == 0) return;
    s.shape(num_rows, num_groups);
    if (is_scale_transposed && args.num_rows > 1 && s.stride(0) != 1)
      s.fail(PYKV_VALUE_ERROR, "rows must lie side by side (stride 1) if is_scale_transposed, got stride %" PRId64,
             s.stride(0));
    args.scales = static_cast<float*>(s.data());
    args.scale_row = s.stride(0);
    args.scale_group = s.stride(1);
    args.group_size = group_size;
    if (args.num_rows == 0) return;
    call.run(stream, args, rms_norm_dynamic_quant_cpu, PYKV_CUDA(rms_norm_dynamic_quant_cuda));
  });
}
