// Decoding over a cache of fp8 e5m2.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

bool launch_decode_e5m2(const Problem& p, const Launch& launch) {
  return launch_decode<Element8<KvFormat::kE5M2>>(p, launch);
}

}  // namespace pykv::attention
