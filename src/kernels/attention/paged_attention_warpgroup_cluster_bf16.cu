// Short calls of 17 to 64 query rows over a cache of bfloat16 on Hopper.
#include "attention/paged_attention_warpgroup_cluster.cuh"

namespace pykv::attention {

void launch_warpgroup_clusters_bf16(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_clusters_of_rows<Element16<bf16>>(p, s, launch, left);
}

}  // namespace pykv::attention
