// Paged attention over a cache of fp8 e5m2.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_e5m2(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_mma<Element8<KvFormat::kE5M2>>(p, rows, launch);
}

}  // namespace pykv::attention
