// Paged attention on CUDA: the call and its workspace.
#include <algorithm>
#include <cstring>

#include "attention/cuda/launch.cuh"
#include "cuda/launch.h"

namespace pykv {
namespace attention {
namespace {

struct ReportNames {
  const char *op, *block_tables, *seq_lens, *cu_query_lens;
};

const ReportNames& report_names(const char* op) {
  static constexpr ReportNames kNames[] = {
      {"paged_attention", "paged_attention: block_tables", "paged_attention: seq_lens",
       "paged_attention: cu_query_lens"},
      {"paged_attention_v1", "paged_attention_v1: block_tables", "paged_attention_v1: seq_lens", ""},
      {"paged_attention_v2", "paged_attention_v2: block_tables", "paged_attention_v2: seq_lens", ""},
  };
  for (const ReportNames& names : kNames) {
    if (std::strcmp(names.op, op) == 0) return names;
  }
  return kNames[0];
}

}  // namespace
}  // namespace attention

int64_t paged_attention_workspace_cuda(int64_t num_tokens, int64_t num_seqs, int num_heads, int num_kv_heads,
                                       int head_size, bool batch_invariant, int device) {
  return attention::workspace_bytes(num_tokens, num_seqs, num_heads, num_kv_heads, head_size, batch_invariant,
                                    attention::device_info(device));
}

void paged_attention_cuda(const PagedAttentionArgs& args, const Launch& launch) {
  using namespace attention;
  if (args.num_tokens == 0 || args.num_seqs == 0) return;

  Plan& plan = last_plan();
  make_plan(args, device_info(launch.device), plan);
  Problem p{};
  p.a = args;
  const ReportNames& names = report_names(args.op);
  p.bad_block = launch.reporter(names.block_tables);
  p.bad_length = launch.reporter(names.seq_lens);
  p.bad_query = launch.reporter(names.cu_query_lens);
  p.a.max_seq_len = most_tokens(args);
  p.group = args.num_heads / args.num_kv_heads;
  p.ways = 1;
  p.window = window_of(args);
  p.softcap_rate = args.softcap == 0 ? 0.f : 2 * kLog2e / args.softcap;
  p.plain_logits = args.softcap == 0 && args.alibi_slopes == nullptr && args.scale > 0;
  const auto small = [](int64_t x) { return static_cast<int>(std::clamp(x, int64_t{0}, int64_t{kNoWindow})); };
  p.sparse = args.sparse.vert_stride > 1;
  p.sparse_block = small(args.sparse.block_size);
  p.sparse_stride = small(args.sparse.vert_stride);
  p.sparse_local = small(args.sparse.local_blocks);
  p.block_size = Divider(args.block_size);

  if (args.workspace && args.workspace_size < plan.workspace) {
    fail(PYKV_VALUE_ERROR, "%s: workspace: %lld bytes are needed, got %lld", args.op,
         static_cast<long long>(plan.workspace), static_cast<long long>(args.workspace_size));
  }
  if (only_plans()) return;
  if (!args.workspace) {
    cuda_check(cudaMallocAsync(&p.a.workspace, plan.workspace, stream_of(launch)), "paged_attention: workspace");
  }
  void* allocated = args.workspace ? nullptr : p.a.workspace;
  try {
    launch_plan(plan, p, launch);
  } catch (...) {
    if (allocated) cudaFreeAsync(allocated, stream_of(launch));
    throw;
  }
  if (allocated) cuda_check(cudaFreeAsync(allocated, stream_of(launch)), "paged_attention: workspace");
}

}  // namespace pykv
