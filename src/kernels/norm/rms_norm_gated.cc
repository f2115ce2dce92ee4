#include "norm/rms_norm_gated.h"

#include <cinttypes>
#include <cstring>

#include "pykv/norm.h"

using namespace pykv;

pykv_status pykv_rms_norm_gated(DLTensor* out, const DLTensor* input, const DLTensor* weight, const DLTensor* z,
                                double epsilon, int64_t group_size, bool norm_before_gate, const char* activation,
                                void* stream) {
  return guarded("rms_norm_gated", [&](Call& call) {
    Dim hidden_size{"hidden_size"};
    const Tensor x = norm_input(call, input, hidden_size);
    const Tensor y = norm_output(call, "out", out, x);
    RmsNormGatedArgs args{};
    args.gate_rows = {1, 1, 0, 0, 0};  // rows without memory have places, too, which must not divide by zero
    set_rows(args, x, y, row_weights(call, "weight", weight, x, hidden_size), epsilon);
    if (z) {
      const Tensor gate = call.read("z", z).same_shape(x).like(x).contiguous_rows();
      args.gate = gate.data();
      args.gate_rows = gate.rows();
    }
    args.gate_first = !norm_before_gate;
    args.sigmoid = std::strcmp(required("activation", activation), "sigmoid") == 0;
    if (!args.sigmoid && std::strcmp(activation, "swish") != 0 && std::strcmp(activation, "silu") != 0)
      fail(PYKV_VALUE_ERROR, "activation: must be 'swish', 'silu' or 'sigmoid', got '%s'", activation);
    if (group_size < 0 || (group_size > 0 && hidden_size % group_size != 0))
      fail(PYKV_VALUE_ERROR, "group_size: must divide hidden_size = %" PRId64 " (or be 0 for one group), got %" PRId64,
           static_cast<int64_t>(hidden_size), group_size);
    if (args.num_rows == 0) return;
    if (group_size > 0) {
      args.groups = hidden_size / group_size;
      args.hidden_size = group_size;
      args.num_rows *= args.groups;
    } else {
      args.groups = 1;
    }
    call.run(stream, args, rms_norm_gated_cpu, PYKV_CUDA(rms_norm_gated_cuda));
  });
}
