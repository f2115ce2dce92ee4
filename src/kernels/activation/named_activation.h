// Activations by the names that mixtures of experts give them.
#pragma once

#include "activation/elementwise_activation.h"
#include "activation/gated_activation.h"
#include "core/call.h"

namespace pykv {

// Checked, whether the activation has them or not.
struct ActivationNumbers {
  float clamp_limit, alpha, beta, situ_beta, situ_linear_beta;

  ActivationNumbers(double clamp_limit, double alpha, double beta, double situ_beta, double situ_linear_beta);
};

// Which it is, as twins: of the two pairs one is null.
struct NamedActivation {
  const char* name;
  Twin<GatedActivationArgs> gated_cpu, gated_cuda;
  Twin<ElementwiseActivationArgs> cpu, cuda;

  bool is_gated() const { return gated_cpu != nullptr; }
  bool is_interleaved() const;
  void set(GatedActivationArgs& args, const ActivationNumbers& numbers) const;
};

// Fails with the names that there are.
const NamedActivation& named_activation(const char* name);

}  // namespace pykv
