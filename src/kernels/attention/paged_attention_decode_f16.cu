// Decoding over a cache of float16.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

void launch_decode_f16(const Problem& p, const Step& s, const Launch& launch) {
  launch_decode<Element16<half>>(p, s, launch);
}

}  // namespace pykv::attention
