#include "norm/layer_norm.h"

#include "pykv/norm.h"

using namespace pykv;

pykv_status pykv_layer_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, const DLTensor* bias,
                            double epsilon, DLTensor* residual, void* stream) {
  return guarded("layer_norm", [&](Call& call) {
    Dim hidden_size{"hidden_size"};
    const Tensor x = norm_input(call, input, hidden_size);
    const Tensor y = norm_output(call, "out", out, x);
    LayerNormArgs args{};
    set_rows(args, x, y, row_weights(call, "weight", weight, x, hidden_size), epsilon);
    args.bias = row_weights(call, "bias", bias, x, hidden_size);
    if (residual) set_residual(args, norm_residual(call, residual, x, y));
    if (args.num_rows == 0) return;
    call.run(stream, args, layer_norm_cpu, PYKV_CUDA(layer_norm_cuda));
  });
}
