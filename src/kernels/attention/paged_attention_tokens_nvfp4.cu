// Several query tokens of few sequences over a cache of nvfp4.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

void launch_tokens_nvfp4(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_tokens<ElementNvfp4>(p, s, launch, left);
}

}  // namespace pykv::attention
