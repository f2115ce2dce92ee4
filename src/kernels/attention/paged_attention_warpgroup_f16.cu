// Up to 64 query rows over a cache of float16 on Hopper.
#include "attention/paged_attention_warpgroup_columns.cuh"

namespace pykv::attention {

bool launch_warpgroups_f16(const Problem& p, RowClass rows, const Launch& launch, LeftPieces* left) {
  return launch_warpgroups<Element16<half>>(p, rows, launch, left);
}

}  // namespace pykv::attention
