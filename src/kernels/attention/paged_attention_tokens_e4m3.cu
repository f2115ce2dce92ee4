// Several query tokens of few sequences over a cache of fp8 e4m3.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

bool launch_tokens_e4m3(const Problem& p, const Launch& launch) {
  return launch_tokens<Element8<KvFormat::kE4M3>>(p, launch);
}

}  // namespace pykv::attention
