// Prefill on Hopper with batch_invariant, over a cache of bfloat16.
#include "attention/paged_attention_wgmma_exact.cuh"

namespace pykv::attention {

bool launch_exact_wgmma_bf16(const Problem& p, const Launch& launch) { return launch_exact_wgmma<bf16>(p, launch); }

}  // namespace pykv::attention
