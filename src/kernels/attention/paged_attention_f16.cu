// Paged attention over a cache of halves.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

void launch_f16(const Problem& p, const Step& s, const Launch& launch) { launch_mma<Element16<half>>(p, s, launch); }

}  // namespace pykv::attention
