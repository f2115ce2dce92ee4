// Prefill on Hopper with batch_invariant, over a cache of halves.
#include "attention/paged_attention_wgmma_exact.cuh"

namespace pykv::attention {

bool launch_exact_wgmma_f16(const Problem& p, const Launch& launch) { return launch_exact_wgmma<half>(p, launch); }

}  // namespace pykv::attention
