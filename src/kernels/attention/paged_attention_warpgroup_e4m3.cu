// Up to 64 query rows over a cache of fp8 e4m3 on Hopper.
#include "attention/paged_attention_warpgroup_codes.cuh"

namespace pykv::attention {

bool launch_warpgroups_e4m3(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left) {
  return launch_warpgroups_of_codes<KvFormat::kE4M3>(p, rows, launch, left);
}

}  // namespace pykv::attention
