// Up to 64 query rows over a cache of int8 on Hopper.
#include "attention/paged_attention_warpgroup_codes.cuh"

namespace pykv::attention {

void launch_warpgroups_int8(const Problem& p, const Step& s, const Launch& launch) {
  launch_warpgroups_of_codes<KvFormat::kInt8>(p, s, launch);
}

}  // namespace pykv::attention
