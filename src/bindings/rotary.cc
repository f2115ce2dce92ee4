#include "pykv/rotary.h"

#include "op.h"

void bind_rotary(Module& m) { m.def<pykv_rotary_embedding>("rotary_embedding"); }
