// Several query tokens of few sequences over a cache of fp8 e5m2.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

bool launch_tokens_e5m2(const Problem& p, const Launch& launch) {
  return launch_tokens<Element8<KvFormat::kE5M2>>(p, launch);
}

}  // namespace pykv::attention
