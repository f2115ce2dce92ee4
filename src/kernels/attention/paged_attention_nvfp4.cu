// Paged attention over a cache of nvfp4.
#include "attention/paged_attention_mma.cuh"

namespace pykv::attention {

void launch_nvfp4(const Problem& p, const Step& s, const Launch& launch) { launch_mma<ElementNvfp4>(p, s, launch); }

}  // namespace pykv::attention
