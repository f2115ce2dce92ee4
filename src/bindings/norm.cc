#include "pykv/norm.h"

#include "op.h"

void bind_norm(Module& m) {
  m.def<pykv_rms_norm>("rms_norm");
  m.def<pykv_fused_add_rms_norm>("fused_add_rms_norm");
}
