// Kernels one after another on the stream.
#include "cuda/workspace.cuh"
#include "moe/few_pairs.h"

namespace pykv {

void quantised_moe_cuda(const QuantisedMoeArgs& args, const Launch& launch) {
  QuantisedMoeArgs a = args;
  with_workspace(args.workspace, args.workspace_bytes, launch, "fused_moe: workspace", [&](void* memory) {
    a.use(memory);
    if (a.sort.num_pairs != 0 && a.sort.num_listed != 0 && a.second.k != 0 && few_pairs_w8a8_cuda(a, launch)) return;
    run_quantised_moe(a,
                      {sort_pairs_cuda, group_quant_cuda, row_quant_cuda, static_quant_cuda, code_records_cuda,
                       scaled_mm_cuda, sum_rows_cuda, block_records_cuda, true},
                      launch);
  });
}

}  // namespace pykv
