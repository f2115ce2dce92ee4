// Decoding over a cache of int8.
#include "attention/paged_attention_decode_launch.cuh"

namespace pykv::attention {

bool launch_decode_int8(const Problem& p, const Launch& launch) {
  return launch_decode<Element8<KvFormat::kInt8>>(p, launch);
}

}  // namespace pykv::attention
