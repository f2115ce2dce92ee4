// Up to 64 query rows over a cache of fp8 e5m2 on Hopper.
#include "attention/paged_attention_warpgroup_codes.cuh"

namespace pykv::attention {

void launch_warpgroups_e5m2(const Problem& p, const Step& s, const Launch& launch) {
  launch_warpgroups_of_codes<KvFormat::kE5M2>(p, s, launch);
}

}  // namespace pykv::attention
