// Up to 64 query rows over a cache of fp8 e4m3 on Hopper.
#include "attention/paged_attention_warpgroup_columns.cuh"

namespace pykv::attention {

bool launch_warpgroups_e4m3(const Problem& p, RowClass rows, const Launch& launch) {
  return launch_warpgroups<WidenedElement<KvFormat::kE4M3>>(p, rows, launch);
}

}  // namespace pykv::attention
