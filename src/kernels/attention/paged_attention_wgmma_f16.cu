// Prefill on Hopper over a cache of halves.
#include "attention/paged_attention_wgmma.cuh"

namespace pykv::attention {

void launch_wgmma_f16(const Problem& p, const Step& s, const Launch& launch) { launch_wgmma<half>(p, s, launch); }

}  // namespace pykv::attention
