#include "quantization/row_quant.h"

#include "pykv/quantization.h"
#include "quantization/code_inputs.h"

namespace pykv {
namespace {

RowQuantArgs arguments(Call& call, const CodeRows& m, RowRule rule, DLTensor* scale) {
  RowQuantArgs args{};
  const Tensor s = row_numbers(call, "scale", scale, m.rows, DType::kFloat32);
  args.dtype = m.input.type();
  args.codes = kind_of(m.codes);
  args.rule = rule;
  args.input = m.input.data();
  args.out = m.codes.data();
  args.scales = static_cast<float*>(s.data());
  args.scale_stride = s.stride(0);
  args.input_rows = m.input.rows();
  args.out_rows = m.codes.rows();
  args.rows = m.rows;
  args.width = m.width;
  return args;
}

void run(Call& call, const CodeRows& m, const RowQuantArgs& args, void* stream) {
  if (!m.empty()) call.run(stream, args, row_quant_cpu, PYKV_CUDA(row_quant_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_dynamic_scaled_int8_quant(DLTensor* result, const DLTensor* input, DLTensor* scale, DLTensor* azp,
                                           void* stream) {
  return guarded("dynamic_scaled_int8_quant", [&](Call& call) {
    const CodeRows m(call, "result", result, input, {DType::kInt8});
    RowQuantArgs args = arguments(call, m, azp ? RowRule::kInt8Shifted : RowRule::kInt8, scale);
    if (azp) {
      const Tensor z = row_numbers(call, "azp", azp, m.rows, DType::kInt32);
      args.zero_points = static_cast<int32_t*>(z.data());
      args.zero_stride = z.stride(0);
    }
    run(call, m, args, stream);
  });
}

pykv_status pykv_per_token_quant_int8(DLTensor* result, const DLTensor* input, DLTensor* scale, void* stream) {
  return guarded("per_token_quant_int8", [&](Call& call) {
    const CodeRows m(call, "result", result, input, {DType::kInt8});
    run(call, m, arguments(call, m, RowRule::kInt8Away, scale), stream);
  });
}

pykv_status pykv_dynamic_per_token_scaled_fp8_quant(DLTensor* result, const DLTensor* input, DLTensor* scale,
                                                    const DLTensor* scale_ub, void* stream) {
  return guarded("dynamic_per_token_scaled_fp8_quant", [&](Call& call) {
    const CodeRows m(call, "result", result, input, kFp8Codes);
    RowQuantArgs args = arguments(call, m, RowRule::kDivide, scale);
    if (scale_ub) {
      args.bounded = true;
      args.bound = call.parameter("scale_ub", scale_ub);
    }
    run(call, m, args, stream);
  });
}
