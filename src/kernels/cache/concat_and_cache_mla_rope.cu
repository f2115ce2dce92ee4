// q_pe and k_pe rotated in place; cache[slot[t] / BS, slot[t] % BS] = concat(kv_c[t], rotated k_pe[t]).
//
// Memory-bound, mostly by q_pe, whose many heads are moved in and out once.  Plain entries are written by the launch that
// rotates, records and nvfp4 by another one, which comes up under the tail of the first.
#include "cache/concat_and_cache_mla_rope.h"

namespace pykv {

void concat_and_cache_mla_rope_cuda(const ConcatAndCacheMlaRopeArgs& args, const Launch& launch) {
  rotary_and_cache_cuda(args.rotary, launch);
  if (args.rotary.rotate_only && args.concat.num_tokens > 0) concat_and_cache_mla_cuda(args.concat, launch);
}

}  // namespace pykv
