// Up to 64 query rows over a cache of float16 on Hopper.
#include "attention/paged_attention_warpgroup_columns.cuh"

namespace pykv::attention {

void launch_warpgroups_f16(const Problem& p, const Step& s, const Launch& launch) {
  launch_warpgroups<Element16<half>>(p, s, launch);
}

}  // namespace pykv::attention
