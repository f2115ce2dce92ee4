// Several query tokens of few sequences over a cache of fp8 e5m2.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

void launch_tokens_e5m2(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_tokens<Element8<KvFormat::kE5M2>>(p, s, launch, left);
}

}  // namespace pykv::attention
