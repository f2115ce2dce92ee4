// Several query tokens of few sequences over a cache of fp8 e4m3.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

void launch_tokens_e4m3(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_tokens<Element8<KvFormat::kE4M3>>(p, s, launch, left);
}

}  // namespace pykv::attention
