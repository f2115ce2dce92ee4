#include "pykv/rotary.h"

#include "op.h"

void bind_rotary(Module& m) {
  m.def<pykv_rotary_embedding>("rotary_embedding");
  m.def<pykv_batched_rotary_embedding>("batched_rotary_embedding");
  m.def<pykv_mrope>("mrope");
  m.def<pykv_dual_chunk_rotary_embedding>("dual_chunk_rotary_embedding");
}
