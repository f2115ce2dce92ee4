// Short calls of 17 to 64 query rows over a cache of fp8 e5m2 on Hopper.
#include "attention/paged_attention_warpgroup_cluster.cuh"

namespace pykv::attention {

bool launch_warpgroup_clusters_e5m2(const Problem& p, const Launch& launch) {
  return launch_clusters_of_codes<KvFormat::kE5M2>(p, launch);
}

}  // namespace pykv::attention
