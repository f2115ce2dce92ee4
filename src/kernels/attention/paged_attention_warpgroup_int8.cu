// Up to 64 query rows over a cache of int8 on Hopper.
#include "attention/paged_attention_warpgroup_codes.cuh"

namespace pykv::attention {

bool launch_warpgroups_int8(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left) {
  return launch_warpgroups_of_codes<KvFormat::kInt8>(p, rows, launch, left);
}

}  // namespace pykv::attention
