// Short calls of 17 to 64 query rows over a cache of fp8 e4m3 on Hopper.
#include "attention/paged_attention_warpgroup_cluster.cuh"

namespace pykv::attention {

void launch_warpgroup_clusters_e4m3(const Problem& p, const Step& s, const Launch& launch, const LeftPieces& left) {
  launch_clusters_of_codes<KvFormat::kE4M3>(p, s, launch, left);
}

}  // namespace pykv::attention
