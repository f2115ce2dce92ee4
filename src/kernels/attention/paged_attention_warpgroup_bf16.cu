// Up to 64 query rows over a cache of bfloat16 on Hopper.
#include "attention/paged_attention_warpgroup_columns.cuh"

namespace pykv::attention {

void launch_warpgroups_bf16(const Problem& p, const Step& s, const Launch& launch) {
  launch_warpgroups<Element16<bf16>>(p, s, launch);
}

}  // namespace pykv::attention
