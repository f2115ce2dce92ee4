// Several query tokens of few sequences over a cache of float16.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

void launch_tokens_f16(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_tokens<Element16<half>>(p, s, launch, left);
}

}  // namespace pykv::attention
