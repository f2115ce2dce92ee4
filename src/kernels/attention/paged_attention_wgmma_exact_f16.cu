// Prefill on Hopper with batch_invariant, over a cache of halves.
#include "attention/paged_attention_wgmma_exact.cuh"

namespace pykv::attention {

void launch_exact_wgmma_f16(const Problem& p, const Step& s, const Launch& launch) {
  launch_exact_wgmma<half>(p, s, launch);
}

}  // namespace pykv::attention
