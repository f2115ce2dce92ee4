#include "activation/named_activation.h"

#include <cstring>
#include <string>

namespace pykv {
namespace {

constexpr NamedActivation gated(const char* name, Twin<GatedActivationArgs> cpu, Twin<GatedActivationArgs> cuda) {
  return {name, cpu, cuda, nullptr, nullptr};
}
constexpr NamedActivation alone(const char* name, Twin<ElementwiseActivationArgs> cpu,
                                Twin<ElementwiseActivationArgs> cuda) {
  return {name, nullptr, nullptr, cpu, cuda};
}

constexpr NamedActivation kActivations[] = {
    gated("silu", silu_and_mul_cpu, PYKV_CUDA(silu_and_mul_cuda)),
    gated("silu_with_clamp", silu_and_mul_with_clamp_cpu, PYKV_CUDA(silu_and_mul_with_clamp_cuda)),
    gated("swigluoai_uninterleave", silu_and_mul_with_clamp_cpu, PYKV_CUDA(silu_and_mul_with_clamp_cuda)),
    gated("gelu", gelu_and_mul_cpu, PYKV_CUDA(gelu_and_mul_cuda)),
    gated("gelu_tanh", gelu_tanh_and_mul_cpu, PYKV_CUDA(gelu_tanh_and_mul_cuda)),
    gated("situ", situ_and_mul_cpu, PYKV_CUDA(situ_and_mul_cuda)),
    gated("swigluoai", swigluoai_and_mul_cpu, PYKV_CUDA(swigluoai_and_mul_cuda)),
    gated("swiglustep", swiglustep_and_mul_cpu, PYKV_CUDA(swiglustep_and_mul_cuda)),
    alone("silu_no_mul", silu_cpu, PYKV_CUDA(silu_cuda)),
    alone("gelu_no_mul", gelu_cpu, PYKV_CUDA(gelu_cuda)),
    alone("gelu_tanh_no_mul", gelu_tanh_cpu, PYKV_CUDA(gelu_tanh_cuda)),
    alone("relu2_no_mul", relu_squared_cpu, PYKV_CUDA(relu_squared_cuda)),
};

}  // namespace

ActivationNumbers::ActivationNumbers(double clamp_limit, double alpha, double beta, double situ_beta,
                                     double situ_linear_beta)
    : clamp_limit(number_or_infinity("clamp_limit", clamp_limit)),
      alpha(number("alpha", alpha)),
      beta(number("beta", beta)),
      situ_beta(number("situ_beta", situ_beta)),
      situ_linear_beta(number("situ_linear_beta", situ_linear_beta)) {}

bool NamedActivation::is_interleaved() const { return std::strcmp(name, "swigluoai") == 0; }

void NamedActivation::set(GatedActivationArgs& args, const ActivationNumbers& numbers) const {
  const bool situ = std::strcmp(name, "situ") == 0;
  args.limit = situ ? numbers.situ_linear_beta : numbers.clamp_limit;
  args.alpha = numbers.alpha;
  args.beta = situ ? numbers.situ_beta : numbers.beta;
}

const NamedActivation& named_activation(const char* name) {
  required("activation", name);
  for (const NamedActivation& a : kActivations)
    if (std::strcmp(name, a.name) == 0) return a;
  std::string names;
  for (const NamedActivation& a : kActivations) names += std::string(a.name) + ", ";
  names.resize(names.size() - 2);
  fail(PYKV_VALUE_ERROR, "activation: must be one of %s, got '%s'", names.c_str(), name);
}

}  // namespace pykv
