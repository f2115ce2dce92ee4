// Decoding over a cache of fp8 e4m3.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

bool launch_decode_e4m3(const Problem& p, const Launch& launch) {
  return launch_decode<Element8<KvFormat::kE4M3>>(p, launch);
}

}  // namespace pykv::attention
