// Decoding over a cache of float16.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

bool launch_decode_f16(const Problem& p, const Launch& launch) { return launch_decode<Element16<half>>(p, launch); }

}  // namespace pykv::attention
