#include "pykv/activation.h"

#include "op.h"

void bind_activation(Module& m) { m.def<pykv_silu_and_mul>("silu_and_mul"); }
