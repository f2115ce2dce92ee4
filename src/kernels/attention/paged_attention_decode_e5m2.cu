// Decoding over a cache of fp8 e5m2.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

void launch_decode_e5m2(const Problem& p, const Step& s, const Launch& launch) {
  launch_decode<Element8<KvFormat::kE5M2>>(p, s, launch);
}

}  // namespace pykv::attention
