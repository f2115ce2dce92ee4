#include "activation/gated_activation.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/activation.h"

namespace pykv {
namespace {

GatedActivationArgs checked(Call& call, const DLTensor* input, const char* result_name, DLTensor* result) {
  const Tensor x = call.read("input", input).rank_between(1, Tensor::kMaxRank).dtype(kFloats).contiguous_rows();
  if (x.size(-1) % 2 != 0)
    x.fail(PYKV_VALUE_ERROR, "the last dimension holds two halves and must be even, got shape %s",
           x.shape_string().c_str());
  Tensor y = call.write(result_name, result).rank(x.ndim()).like(x);
  for (int i = 0; i < x.ndim() - 1; ++i)
    if (y.size(i) != x.size(i))
      y.fail(PYKV_VALUE_ERROR, "dimension %d must be that of input, %" PRId64 ", got shape %s", i, x.size(i),
             y.shape_string().c_str());
  Dim width("width", x.size(-1) / 2);
  y.last_dim(width).contiguous_rows().no_overlap_within();
  return {
      .dtype = x.type(),
      .result = y.data(),
      .input = x.data(),
      .result_rows = y.rows(),
      .input_rows = x.rows(),
      .num_rows = x.numel() == 0 ? 0 : x.numel() / x.size(-1),
      .width = width,
  };
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_silu_and_mul(DLTensor* result, const DLTensor* input, void* stream) {
  return guarded("silu_and_mul", [&](Call& call) {
    const GatedActivationArgs args = checked(call, input, "result", result);
    if (args.num_rows == 0) return;
    call.run(stream, args, silu_and_mul_cpu, PYKV_CUDA(silu_and_mul_cuda));
  });
}

pykv_status pykv_gelu_tanh_and_mul(DLTensor* out, const DLTensor* input, void* stream) {
  return guarded("gelu_tanh_and_mul", [&](Call& call) {
    const GatedActivationArgs args = checked(call, input, "out", out);
    if (args.num_rows == 0) return;
    call.run(stream, args, gelu_tanh_and_mul_cpu, PYKV_CUDA(gelu_tanh_and_mul_cuda));
  });
}
