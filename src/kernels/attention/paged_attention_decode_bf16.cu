// Decoding over a cache of bfloat16.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

bool launch_decode_bf16(const Problem& p, const Launch& launch) { return launch_decode<Element16<bf16>>(p, launch); }

}  // namespace pykv::attention
