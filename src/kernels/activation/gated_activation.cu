// The gated activations without parameters.
#include "activation/gated_activation.cuh"

namespace pykv {
namespace {

template <class T>
struct SiluAndMul : Halves {
  __device__ explicit SiluAndMul(const GatedActivationArgs&) {}
  __device__ float activation(float x) const { return silu(x); }
};

template <class T>
struct GeluAndMul : Halves {
  __device__ explicit GeluAndMul(const GatedActivationArgs&) {}
  __device__ float activation(float x) const { return gelu(x); }
};

template <class T>
struct GeluTanhAndMul : Halves {
  __device__ explicit GeluTanhAndMul(const GatedActivationArgs&) {}
  __device__ float activation(float x) const { return gelu_tanh(x); }
};

}  // namespace

void silu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<SiluAndMul>("silu_and_mul", args, launch);
}

void gelu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<GeluAndMul>("gelu_and_mul", args, launch);
}

void gelu_tanh_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<GeluTanhAndMul>("gelu_tanh_and_mul", args, launch);
}

}  // namespace pykv
