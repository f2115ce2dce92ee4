// The gated activations with a limit or a threshold.  fminf and fmaxf take the number where the other is NaN, so that NaN
// becomes the limit.
#include "activation/gated_activation.cuh"

namespace pykv {
namespace {

// min(x, limit), rounded to T, is min(x, limit rounded to T).
template <class T>
struct SiluAndMulWithClamp : Halves {
  static constexpr bool kPlain = false;
  float limit, low;
  __device__ explicit SiluAndMulWithClamp(const GatedActivationArgs& args)
      : limit(to_float(from_float<T>(args.limit))), low(to_float(from_float<T>(-args.limit))) {}
  __device__ float activation(float x) const { return silu(fminf(x, limit)); }
  __device__ float product(float activated, float up) const { return activated * fmaxf(fminf(up, limit), low); }
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

}  // namespace pykv
