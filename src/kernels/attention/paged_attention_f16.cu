// Paged attention over a cache of halves.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_f16(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_mma<Element16<half>>(p, rows, launch);
}

}  // namespace pykv::attention
