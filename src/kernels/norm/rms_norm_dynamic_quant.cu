// Rows as they are; those that a residual is added to first: rms_norm_dynamic_quant_residual.cu.
#include "norm/rms_norm_dynamic_quant.cuh"

namespace pykv {

void rms_norm_dynamic_quant_cuda(const RmsNormDynamicQuantArgs& args, const Launch& launch) {
  if (args.residual) return rms_norm_dynamic_quant_residual_cuda(args, launch);
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() { run<T, Input>(args, launch); });
}

}  // namespace pykv
