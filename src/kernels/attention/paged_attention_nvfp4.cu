// Paged attention over a cache of nvfp4.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_nvfp4(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_mma<ElementNvfp4>(p, rows, launch);
}

}  // namespace pykv::attention
