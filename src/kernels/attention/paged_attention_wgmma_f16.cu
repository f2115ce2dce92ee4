// Prefill on Hopper over a cache of halves.
#include "attention/paged_attention_wgmma.cuh"

namespace pykv::attention {

bool launch_wgmma_f16(const Problem& p, const Launch& launch) { return launch_wgmma<half>(p, launch); }

}  // namespace pykv::attention
