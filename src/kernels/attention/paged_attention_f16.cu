// Paged attention over a cache of halves.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_f16(const Problem& p, bool many, const Launch& launch) { return launch_mma<Element16<half>>(p, many, launch); }

}  // namespace pykv::attention
