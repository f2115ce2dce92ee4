// Decoding over a cache of int8.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

void launch_decode_int8(const Problem& p, const Step& s, const Launch& launch) {
  launch_decode<Element8<KvFormat::kInt8>>(p, s, launch);
}

}  // namespace pykv::attention
