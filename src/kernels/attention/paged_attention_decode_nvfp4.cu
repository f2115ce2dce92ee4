// Decoding over a cache of nvfp4.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

bool launch_decode_nvfp4(const Problem& p, const Launch& launch) { return launch_decode<ElementNvfp4>(p, launch); }

}  // namespace pykv::attention
