// Several query tokens of few sequences over a cache of float16.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

bool launch_tokens_f16(const Problem& p, const Launch& launch) { return launch_tokens<Element16<half>>(p, launch); }

}  // namespace pykv::attention
