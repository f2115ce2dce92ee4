// Several query tokens of few sequences over a cache of int8.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

bool launch_tokens_int8(const Problem& p, const Launch& launch) {
  return launch_tokens<Element8<KvFormat::kInt8>>(p, launch);
}

}  // namespace pykv::attention
