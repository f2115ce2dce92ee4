// Decoding over a cache of nvfp4.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

void launch_decode_nvfp4(const Problem& p, const Step& s, const Launch& launch) {
  launch_decode<ElementNvfp4>(p, s, launch);
}

}  // namespace pykv::attention
