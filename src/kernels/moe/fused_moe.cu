// Kernels one after another on the stream.
#include "cuda/workspace.cuh"
#include "moe/few_pairs.h"

namespace pykv {
namespace {

void multiply(const ExpertProduct& product, const ExpertGemmFusion& fusion, const Launch& launch) {
  if (product.is_packed || product.n() == 0) return expert_product_cuda(product, launch);
  expert_gemm_fused_cuda(product.plain, fusion, launch);
}

void activate(const FusedMoeArgs& a, const Launch& launch) {
  if (a.gated.width != 0) a.activation->gated_cuda(a.gated, launch);
  if (a.elementwise.width != 0) a.activation->cuda(a.elementwise, launch);
}

void run(FusedMoeArgs& a, const Launch& launch) {
  if (a.has_products() && few_pairs_cuda(a, launch)) return;
  if (a.sort.num_pairs != 0) sort_pairs_cuda(a.sort, launch);
  a.sum.numbers_are_old = a.has_products();
  if (a.has_products()) {
    const bool fused = !a.first.is_packed && a.activation->gated_cuda == silu_and_mul_cuda;
    if (fused) {
      a.first.plain.out = a.gated.result;
      a.first.plain.out_stride = a.gated.width;
    }
    multiply(a.first, {.silu_and_mul = fused, .map_is_old = false}, launch);
    if (!fused) activate(a, launch);
    multiply(a.second, {.silu_and_mul = false, .map_is_old = true}, launch);
  }
  sum_rows_cuda(a.sum, launch);
}

}  // namespace

void fused_moe_cuda(const FusedMoeArgs& args, const Launch& launch) {
  FusedMoeArgs a = args;
  with_workspace(args.workspace, args.workspace_bytes, launch, "fused_moe: workspace", [&](void* memory) {
    a.use(memory);
    run(a, launch);
  });
}

}  // namespace pykv
