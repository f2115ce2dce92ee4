#include "pykv/activation.h"

#include "op.h"

void bind_activation(Module& m) {
  m.def<pykv_silu_and_mul>("silu_and_mul");
  m.def<pykv_gelu_tanh_and_mul>("gelu_tanh_and_mul");
}
