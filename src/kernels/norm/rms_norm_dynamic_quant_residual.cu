// Rows that a residual is added to first.
#include "norm/rms_norm_dynamic_quant.cuh"

namespace pykv {

void rms_norm_dynamic_quant_residual_cuda(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype,
                              [&]<class T>() { run<T, WithResidual<T, false>::template Source>(args, launch); });
}

}  // namespace pykv
