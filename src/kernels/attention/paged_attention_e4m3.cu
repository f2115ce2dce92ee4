// Paged attention over a cache of fp8 e4m3.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_e4m3(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_mma<Element8<KvFormat::kE4M3>>(p, rows, launch);
}

}  // namespace pykv::attention
