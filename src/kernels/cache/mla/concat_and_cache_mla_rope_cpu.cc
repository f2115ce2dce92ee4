// Twin of concat_and_cache_mla_rope.cu.
#include "cache/mla/concat_and_cache_mla_rope.h"

namespace pykv::PYKV_ISA {

void concat_and_cache_mla_rope_cpu(const ConcatAndCacheMlaRopeArgs& args, const Launch& launch) {
  PYKV_ISA::rotary_and_cache_cpu(args.rotary, launch);
  if (args.rotary.rotate_only) PYKV_ISA::concat_and_cache_mla_cpu(args.concat, launch);
}

}  // namespace pykv::PYKV_ISA
