// Prefill on Hopper over a cache of bfloat16.
#include "attention/paged_attention_wgmma.cuh"

namespace pykv::attention {

void launch_wgmma_bf16(const Problem& p, const Step& s, const Launch& launch) { launch_wgmma<bf16>(p, s, launch); }

}  // namespace pykv::attention
