// Paged attention over a cache of bfloat16.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

bool launch_bf16(const Problem& p, bool many, const Launch& launch) { return launch_mma<Element16<bf16>>(p, many, launch); }

}  // namespace pykv::attention
