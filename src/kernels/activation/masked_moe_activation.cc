// An activation by name, of those rows that an expert's tokens fill.
#include <cinttypes>
#include <cstring>

#include "activation/activation_inputs.h"
#include "pykv/activation.h"

namespace pykv {
namespace {

struct GatedActivation {
  const char* name;
  Twin<GatedActivationArgs> cpu, cuda;
};
constexpr GatedActivation kGated[] = {
    {"silu", silu_and_mul_cpu, PYKV_CUDA(silu_and_mul_cuda)},
    {"silu_with_clamp", silu_and_mul_with_clamp_cpu, PYKV_CUDA(silu_and_mul_with_clamp_cuda)},
    {"swigluoai_uninterleave", silu_and_mul_with_clamp_cpu, PYKV_CUDA(silu_and_mul_with_clamp_cuda)},
    {"gelu", gelu_and_mul_cpu, PYKV_CUDA(gelu_and_mul_cuda)},
    {"gelu_tanh", gelu_tanh_and_mul_cpu, PYKV_CUDA(gelu_tanh_and_mul_cuda)},
    {"situ", situ_and_mul_cpu, PYKV_CUDA(situ_and_mul_cuda)},
    {"swigluoai", swigluoai_and_mul_cpu, PYKV_CUDA(swigluoai_and_mul_cuda)},
    {"swiglustep", swiglustep_and_mul_cpu, PYKV_CUDA(swiglustep_and_mul_cuda)},
};

struct ElementwiseActivation {
  const char* name;
  Twin<ElementwiseActivationArgs> cpu, cuda;
};
constexpr ElementwiseActivation kElementwise[] = {
    {"silu_no_mul", silu_cpu, PYKV_CUDA(silu_cuda)},
    {"gelu_no_mul", gelu_cpu, PYKV_CUDA(gelu_cuda)},
    {"gelu_tanh_no_mul", gelu_tanh_cpu, PYKV_CUDA(gelu_tanh_cuda)},
    {"relu2_no_mul", relu_squared_cpu, PYKV_CUDA(relu_squared_cuda)},
};

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
    required("activation", activation);
    for (const GatedActivation& a : kGated) {
      if (std::strcmp(activation, a.name) != 0) continue;
      const bool situ = std::strcmp(activation, "situ") == 0;
      GatedActivationArgs args = gated_args(call, input, "out", out);
      if (std::strcmp(activation, "swigluoai") == 0) not_in_place(args);
      args.limit = static_cast<float>(situ ? situ_linear_beta : clamp_limit);
      args.alpha = static_cast<float>(alpha);
      args.beta = static_cast<float>(situ ? situ_beta : beta);
      args.mask = mask_of(call, input, valid_token_counts);
      if (args.num_rows != 0) call.run(stream, args, a.cpu, a.cuda);
      return;
    }
    for (const ElementwiseActivation& a : kElementwise) {
      if (std::strcmp(activation, a.name) != 0) continue;
      ElementwiseActivationArgs args = elementwise_args(call, out, input);
      args.mask = mask_of(call, input, valid_token_counts);
      if (args.num_rows != 0) call.run(stream, args, a.cpu, a.cuda);
      return;
    }
    std::string names;
    for (const GatedActivation& a : kGated) names += std::string(a.name) + ", ";
    for (const ElementwiseActivation& a : kElementwise) names += std::string(a.name) + ", ";
    names.resize(names.size() - 2);
    fail(PYKV_VALUE_ERROR, "activation: must be one of %s, got '%s'", names.c_str(), activation);
  });
}
