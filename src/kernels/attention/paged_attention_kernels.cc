// What calls of paged attention launch.
#include "attention/paged_attention_kernels.h"

#include <cstdio>
#include <iterator>
#include <string>

#include "pykv/attention.h"

namespace pykv::attention {
namespace {

constexpr const char* kNames[] = {
    "cpu",
    "simple",
    "mma",
    "mma_invariant",
    "decode_line",
    "decode_cluster",
    "decode_spans",
    "decode_either",
    "window_cluster",
    "folded_line",
    "folded_cluster",
    "folded_either",
    "small_pages_line",
    "small_pages_cluster",
    "invariant_line",
    "invariant_cluster",
    "invariant_spans",
    "tokens_line",
    "tokens_cluster",
    "tokens_spans",
    "tokens_either",
    "warpgroup_line",
    "warpgroup_block",
    "warpgroup_cluster",
    "warpgroup_spans",
    "prefill",
    "prefill_invariant",
    "clear",
    "combine",
    "combine_invariant",
};
static_assert(std::size(kNames) == kKernels);

struct Plan {
  static constexpr int kMost = 8;
  bool only_plans = false;
  int count = 0;
  PlannedLaunch launches[kMost];
  int64_t workspace = 0;
};

thread_local Plan plan;

}  // namespace

const char* name_of(KernelId kernel) { return kNames[static_cast<int>(kernel)]; }

bool only_plans() { return plan.only_plans; }
void only_plan(bool on) { plan.only_plans = on; }

void begin_plan() {
  plan.count = 0;
  plan.workspace = 0;
}

void note_workspace(int64_t bytes) { plan.workspace = bytes; }

bool note_launch(const PlannedLaunch& launch) {
  if (plan.count < Plan::kMost) plan.launches[plan.count++] = launch;
  return !plan.only_plans;
}

const char* plan_text() {
  static thread_local std::string text;
  text.clear();
  char line[256];
  for (int i = 0; i < plan.count; ++i) {
    const PlannedLaunch& x = plan.launches[i];
    text += name_of(x.instance.kernel);
    if (x.instance.head_size > 0) {
      std::snprintf(line, sizeof line, "<%d, %d>", x.instance.head_size, x.instance.rows);
      text += line;
    }
    if (x.grid > 0) {
      std::snprintf(line, sizeof line, ": grid %d, threads %d, cluster %d, shared memory %zu", x.grid, x.threads,
                    x.cluster, x.shared_bytes);
      text += line;
    }
    text += '\n';
  }
  std::snprintf(line, sizeof line, "workspace %lld\n", static_cast<long long>(plan.workspace));
  return (text += line).c_str();
}

}  // namespace pykv::attention

using namespace pykv::attention;

void pykv_paged_attention_only_plan(bool on) { only_plan(on); }

const char* pykv_paged_attention_plan(void) { return plan_text(); }

const char* pykv_paged_attention_kernel(int32_t id) {
  return id >= 0 && id < kKernels ? name_of(static_cast<KernelId>(id)) : nullptr;
}
