// Which experts pairs go to.
#pragma once

#include "moe/sort_pairs.h"

namespace pykv {

struct PairExperts {
  PairIds ids;
  Index map;
  int64_t num_experts;
  int32_t num_listed;
  Reporter report_ids, report_map;

  PairExperts() = default;
  PairExperts(const SortPairsArgs& sort, const Launch& launch)
      : ids(sort.ids),
        map(sort.expert_map),
        num_experts(sort.num_experts),
        num_listed(static_cast<int32_t>(sort.num_listed)),
        report_ids(launch.reporter(sort.report_ids)),
        report_map(launch.reporter(sort.report_map)) {}

  // From ids to experts, negative: none.  All loads are under way before one is looked at.
  template <int kSize>
  __device__ void of(const int64_t (&ids_of_pairs)[kSize], bool reports, int32_t (&experts)[kSize]) const {
    int64_t listed[kSize], beyond_ids = -1, beyond_map = -1;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int64_t id = ids_of_pairs[i];
      listed[i] = id < 0 || id >= num_experts ? -1 : map.data ? map[id] : id;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (ids_of_pairs[i] >= num_experts) beyond_ids = ids_of_pairs[i];
      if (listed[i] >= num_listed) beyond_map = listed[i];
      experts[i] = listed[i] >= 0 && listed[i] < num_listed ? static_cast<int32_t>(listed[i]) : -1;
    }
    if (beyond_ids >= 0 && reports) report_ids(beyond_ids, num_experts);
    if (beyond_map >= 0 && reports) report_map(beyond_map, num_listed);
  }

  __device__ int32_t operator()(int64_t token, int64_t choice, bool reports) const {
    const int64_t id[] = {ids.at(token, choice)};
    int32_t expert[1];
    of(id, reports, expert);
    return expert[0];
  }
};

}  // namespace pykv
