// Several query tokens of few sequences over a cache of bfloat16.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

bool launch_tokens_bf16(const Problem& p, const Launch& launch) { return launch_tokens<Element16<bf16>>(p, launch); }

}  // namespace pykv::attention
