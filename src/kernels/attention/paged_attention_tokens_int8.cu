// Several query tokens of few sequences over a cache of int8.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

void launch_tokens_int8(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_tokens<Element8<KvFormat::kInt8>>(p, s, launch, left);
}

}  // namespace pykv::attention
