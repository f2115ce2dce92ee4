// What calls of paged attention launch.
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>

#include "attention/cuda/plan.h"
#include "core/call.h"
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
    "verify_line",
    "verify_block",
    "verify_cluster",
    "verify_spans",
    "prefill",
    "prefill_invariant",
    "clear",
    "combine",
};
static_assert(std::size(kNames) == kKernels);

// What is known of a kind of device without asking one; chips of a kind differ in which SMs they lack, and so in how many clusters
// find room.
constexpr DeviceInfo kA100 = {108, 80, false, 163 << 10, 164 << 10, 2048, {}};
constexpr DeviceInfo kHopper = {132,
                                90,
                                true,
                                227 << 10,
                                228 << 10,
                                2048,
                                {{0, 132, 66, 43, 32, 24, 20, 15, 15}, {0, 264, 132, 86, 64, 48, 40, 30, 30}}};

thread_local bool only_planning = false;
thread_local const DeviceInfo* planned_for = nullptr;
thread_local Plan plan{};

}  // namespace

const char* name_of(KernelId kernel) { return kNames[static_cast<int>(kernel)]; }

bool only_plans() { return only_planning; }
void only_plan(bool on) { only_planning = on; }
Plan& last_plan() { return plan; }
const DeviceInfo* planned_device() { return planned_for; }

const DeviceInfo* device_called(const char* name) {
  const std::string_view wanted = name;
  return wanted == "A100" ? &kA100 : wanted == "H100" || wanted == "H200" ? &kHopper : nullptr;
}

const char* plan_text() {
  static thread_local std::string text;
  text.clear();
  char line[256];
  for (int i = 0; i < plan.count; ++i) {
    const Step& x = plan.steps[i];
    text += name_of(x.instance.kernel);
    if (x.instance.head_size > 0) {
      std::snprintf(line, sizeof line, "<%d, %d>", x.instance.head_size, x.instance.rows);
      text += line;
    }
    if (x.grid > 0) {
      std::snprintf(line, sizeof line, ": grid %d, threads %d, cluster %d, shared memory %d", x.grid, x.threads,
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

pykv_status pykv_paged_attention_plan_for(const char* device) {
  return pykv::guarded("paged_attention_plan_for", [&](pykv::Call&) {
    const DeviceInfo* known = device ? device_called(device) : nullptr;
    if (device && !known)
      pykv::fail(PYKV_VALUE_ERROR, "device: must be one of 'A100', 'H100' and 'H200', got '%s'", device);
    planned_for = known;
  });
}

const char* pykv_paged_attention_plan(void) { return plan_text(); }

const char* pykv_paged_attention_kernel(int32_t id) {
  return id >= 0 && id < kKernels ? name_of(static_cast<KernelId>(id)) : nullptr;
}
