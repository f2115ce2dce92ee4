// Prefill on Hopper over a cache of bfloat16.
#include "attention/paged_attention_wgmma.cuh"

namespace pykv::attention {

bool launch_wgmma_bf16(const Problem& p, const Launch& launch) { return launch_wgmma<bf16>(p, launch); }

}  // namespace pykv::attention
