#include "activation/elementwise_activation.h"

#include "activation/activation_inputs.h"
#include "core/call.h"
#include "pykv/activation.h"

namespace pykv {

ElementwiseActivationArgs elementwise_args(Call& call, DLTensor* out, const DLTensor* input) {
  const Tensor x = call.read("input", input).rank_between(1, Tensor::kMaxRank).dtype(kFloats).contiguous_rows();
  const Tensor y = call.write("out", out).same_shape(x).like(x).contiguous_rows().no_overlap_within();
  return {
      .dtype = x.type(),
      .out = y.data(),
      .input = x.data(),
      .out_rows = y.rows(),
      .input_rows = x.rows(),
      .num_rows = x.numel() == 0 ? 0 : x.numel() / x.size(-1),
      .width = x.size(-1),
      .alpha_p = {},
      .alpha_n = {},
      .beta = 0.0f,
      .eps = 0.0f,
      .mask = {},
  };
}

namespace {

using ElementwiseTwin = Twin<ElementwiseActivationArgs>;

pykv_status activate(const char* op, DLTensor* out, const DLTensor* input, void* stream, ElementwiseTwin cpu,
                     ElementwiseTwin cuda) {
  return guarded(op, [&](Call& call) {
    const ElementwiseActivationArgs args = elementwise_args(call, out, input);
    if (args.num_rows == 0) return;
    call.run(stream, args, cpu, cuda);
  });
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_gelu_new(DLTensor* out, const DLTensor* input, void* stream) {
  return activate("gelu_new", out, input, stream, gelu_tanh_cpu, PYKV_CUDA(gelu_tanh_cuda));
}

pykv_status pykv_gelu_fast(DLTensor* out, const DLTensor* input, void* stream) {
  return activate("gelu_fast", out, input, stream, gelu_tanh_cpu, PYKV_CUDA(gelu_tanh_cuda));
}

pykv_status pykv_gelu_quick(DLTensor* out, const DLTensor* input, void* stream) {
  return activate("gelu_quick", out, input, stream, gelu_quick_cpu, PYKV_CUDA(gelu_quick_cuda));
}

pykv_status pykv_relu2(DLTensor* out, const DLTensor* input, void* stream) {
  return activate("relu2", out, input, stream, relu2_cpu, PYKV_CUDA(relu2_cuda));
}

pykv_status pykv_relu_squared(DLTensor* out, const DLTensor* input, void* stream) {
  return activate("relu_squared", out, input, stream, relu_squared_cpu, PYKV_CUDA(relu_squared_cuda));
}

pykv_status pykv_xielu(DLTensor* out, const DLTensor* input, const DLTensor* alpha_p, const DLTensor* alpha_n,
                       double beta, double eps, void* stream) {
  return guarded("xielu", [&](Call& call) {
    ElementwiseActivationArgs args = elementwise_args(call, out, input);
    args.alpha_p = call.parameter("alpha_p", alpha_p);
    args.alpha_n = call.parameter("alpha_n", alpha_n);
    args.beta = number("beta", beta);
    args.eps = number("eps", eps);
    if (args.num_rows == 0) return;
    call.run(stream, args, xielu_cpu, PYKV_CUDA(xielu_cuda));
  });
}
