// Decoding over a cache of fp8 e4m3.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

void launch_decode_e4m3(const Problem& p, const Step& s, const Launch& launch) {
  launch_decode<Element8<KvFormat::kE4M3>>(p, s, launch);
}

}  // namespace pykv::attention
