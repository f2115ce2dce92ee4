// An activation by name, of those rows that an expert's tokens fill.
#include "activation/activation_inputs.h"
#include "activation/named_activation.h"
#include "pykv/activation.h"

namespace pykv {
namespace {

RowMask mask_of(Call& call, const DLTensor* input, const DLTensor* valid_token_counts) {
  const Tensor x = call.read("input", input).rank_between(2, 3);
  Dim experts("num_experts", x.ndim() == 3 ? x.size(0) : 1);
  return {call.read("valid_token_counts", valid_token_counts).shape(experts).index(), x.size(-2)};
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_masked_moe_activation(DLTensor* out, const DLTensor* input, const DLTensor* valid_token_counts,
                                       const char* activation, double clamp_limit, double alpha, double beta,
                                       double situ_beta, double situ_linear_beta, void* stream) {
  return guarded("masked_moe_activation", [&](Call& call) {
    const NamedActivation& a = named_activation(activation);
    const ActivationNumbers numbers(clamp_limit, alpha, beta, situ_beta, situ_linear_beta);
    if (a.is_gated()) {
      GatedActivationArgs args = gated_args(call, input, "out", out);
      if (a.is_interleaved()) not_in_place(args);
      a.set(args, numbers);
      args.mask = mask_of(call, input, valid_token_counts);
      if (args.num_rows != 0) call.run(stream, args, a.gated_cpu, a.gated_cuda);
    } else {
      ElementwiseActivationArgs args = elementwise_args(call, out, input);
      args.mask = mask_of(call, input, valid_token_counts);
      if (args.num_rows != 0) call.run(stream, args, a.cpu, a.cuda);
    }
  });
}
