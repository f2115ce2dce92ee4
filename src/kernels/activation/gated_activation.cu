// The gated activations without a limit.
#include "activation/gated_activation.cuh"

namespace pykv {
namespace {

template <class T>
struct SiluAndMul : Halves {
  __device__ explicit SiluAndMul(const GatedActivationArgs&) {}
  __device__ float activation(float x) const { return silu_of<T>(x); }
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

void silu_and_mul_quant_cuda(const GatedActivationArgs& args, const Launch& launch) {
  if (args.result_dtype == DType::kInt8) {
    run_in_vectors<SiluAndMul, InInt8>("silu_and_mul_quant", args, launch);
  } else {
    run_in_vectors<SiluAndMul, InE4M3>("silu_and_mul_quant", args, launch);
  }
}

void gelu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<GeluAndMul>("gelu_and_mul", args, launch);
}

void gelu_tanh_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<GeluTanhAndMul>("gelu_tanh_and_mul", args, launch);
}

}  // namespace pykv
