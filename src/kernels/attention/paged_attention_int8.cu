// Paged attention over a cache of int8.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_int8(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_mma<Element8<KvFormat::kInt8>>(p, rows, launch);
}

}  // namespace pykv::attention
