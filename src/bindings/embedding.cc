#include "pykv/embedding.h"

#include "op.h"

void bind_embedding(Module& m) { m.def<pykv_masked_embedding>("masked_embedding"); }
