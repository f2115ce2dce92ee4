// Several query tokens of few sequences over a cache of nvfp4.
#include "attention/paged_attention_tokens.cuh"

namespace pykv::attention {

bool launch_tokens_nvfp4(const Problem& p, const Launch& launch) { return launch_tokens<ElementNvfp4>(p, launch); }

}  // namespace pykv::attention
