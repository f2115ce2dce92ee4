// Paged attention over a cache of bfloat16.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_bf16(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_mma<Element16<bf16>>(p, rows, launch);
}

}  // namespace pykv::attention
