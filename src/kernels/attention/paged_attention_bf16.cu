// Paged attention over a cache of bfloat16.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

void launch_bf16(const Problem& p, const Step& s, const Launch& launch) { launch_mma<Element16<bf16>>(p, s, launch); }

}  // namespace pykv::attention
