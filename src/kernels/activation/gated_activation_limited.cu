// The gated activations with parameters.  fminf and fmaxf take the number where the other is NaN, so that NaN
// becomes the limit.
#include "activation/gated_activation.cuh"

namespace pykv {
namespace {

// A gate's min(x, limit), rounded to T, is min(x, limit rounded to T).
template <class T>
struct SiluAndMulWithClamp : Halves {
  static constexpr bool kPlain = false;
  float gate_limit, limit, alpha, beta;
  __device__ explicit SiluAndMulWithClamp(const GatedActivationArgs& args)
      : gate_limit(to_float(from_float<T>(args.limit))), limit(args.limit), alpha(args.alpha), beta(args.beta) {}
  __device__ float activation(float x) const {
    x = fminf(x, gate_limit);
    return times_sigmoid(x, alpha * x);
  }
  __device__ float product(float activated, float up) const {
    return activated * (fmaxf(fminf(up, limit), -limit) + beta);
  }
};

template <class T>
struct FatreluAndMul : Halves {
  float threshold;
  __device__ explicit FatreluAndMul(const GatedActivationArgs& args) : threshold(args.limit) {}
  __device__ float activation(float x) const { return x > threshold ? x : 0.0f; }
};

template <class T>
struct SwigluoaiAndMul {
  static constexpr bool kInterleaved = true, kRounded = false, kPlain = false;
  float alpha, limit;
  __device__ explicit SwigluoaiAndMul(const GatedActivationArgs& args) : alpha(args.alpha), limit(args.limit) {}
  __device__ float activation(float x) const {
    x = fminf(x, limit);
    return x * sigmoid(alpha * x);
  }
  __device__ float product(float activated, float up) const {
    return (fmaxf(fminf(up, limit), -limit) + 1.0f) * activated;
  }
};

template <class T>
struct SwiglustepAndMul {
  static constexpr bool kInterleaved = false, kRounded = false, kPlain = false;
  float limit;
  __device__ explicit SwiglustepAndMul(const GatedActivationArgs& args) : limit(args.limit) {}
  __device__ float activation(float x) const { return fminf(silu(x), limit); }
  __device__ float product(float activated, float up) const { return activated * fmaxf(fminf(up, limit), -limit); }
};

template <class T>
struct SituAndMul : Situ<T> {
  static constexpr bool kInterleaved = false, kRounded = false, kPlain = false;
  __device__ explicit SituAndMul(const GatedActivationArgs& args) : Situ<T>(args.beta, args.limit) {}
};

}  // namespace

void silu_and_mul_with_clamp_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<SiluAndMulWithClamp>("silu_and_mul_with_clamp", args, launch);
}

void fatrelu_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<FatreluAndMul>("fatrelu_and_mul", args, launch);
}

void swigluoai_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<SwigluoaiAndMul>("swigluoai_and_mul", args, launch);
}

void swiglustep_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<SwiglustepAndMul>("swiglustep_and_mul", args, launch);
}

void situ_and_mul_cuda(const GatedActivationArgs& args, const Launch& launch) {
  run_in_vectors<SituAndMul>("situ_and_mul", args, launch);
}

}  // namespace pykv
