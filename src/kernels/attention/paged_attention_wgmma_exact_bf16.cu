// Prefill on Hopper with batch_invariant, over a cache of bfloat16.
#include "attention/paged_attention_wgmma_exact.cuh"

namespace pykv::attention {

void launch_exact_wgmma_bf16(const Problem& p, const Step& s, const Launch& launch) {
  launch_exact_wgmma<bf16>(p, s, launch);
}

}  // namespace pykv::attention
