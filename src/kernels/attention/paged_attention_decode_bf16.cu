// Decoding over a cache of bfloat16.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

void launch_decode_bf16(const Problem& p, const Step& s, const Launch& launch) {
  launch_decode<Element16<bf16>>(p, s, launch);
}

}  // namespace pykv::attention
