#include "pykv/moe.h"

#include "op.h"

void bind_moe(Module& m) {
  m.def<pykv_topk_softmax>("topk_softmax");
  m.def<pykv_topk_sigmoid>("topk_sigmoid");
  m.def<pykv_topk_softplus_sqrt>("topk_softplus_sqrt");
  m.def<pykv_grouped_topk>("grouped_topk");
}
