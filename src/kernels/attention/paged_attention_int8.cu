// Paged attention over a cache of int8.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

void launch_int8(const Problem& p, const Step& s, const Launch& launch) {
  launch_mma<Element8<KvFormat::kInt8>>(p, s, launch);
}

}  // namespace pykv::attention
