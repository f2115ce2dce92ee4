// Kernels one after another on the stream.
#include "cuda/device.h"
#include "cuda/workspace.cuh"
#include "gemm/packed_gemm_few_sm90.h"
#include "gemm/packed_gemm_many_sm90.h"
#include "moe/few_pairs.h"
#include "moe/move_rows.h"

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

// Whether the layer was launched: with many pairs for each expert, packed weights and silu_and_mul, on Hopper.  Rows lie in the order of
// experts, not of pairs: a product has tiles as high as each expert asks for, and the first one activates its results.
bool run_many(const FusedMoeArgs& args, const Launch& launch) {
  constexpr int64_t kPairsOfExpert = 96;  // at least: fewer are quicker in tiles of a map
  if (!args.first.is_packed || !args.second.is_packed || args.sort.num_pairs < args.sort.num_listed * kPairsOfExpert ||
      args.activation->gated_cuda != silu_and_mul_cuda || !has_warpgroups(launch.device))
    return false;
  FusedMoeArgs a = args;
  SortPairsArgs& sort = a.sort;
  PackedGemmArgs &first = a.first.packed, &second = a.second.packed;
  sort.offsets = sort.blocks;
  sort.sorted = sort.blocks = sort.num_padded = nullptr;
  sort.block_size = 1;
  sort.capacity = sort.num_blocks = 0;
  const PairIds places{sort.places, sort.top_k, 1, false};
  // Rows of x lie where those of the second product will.
  const int64_t row_bytes = first.weight.k * 2;
  MoveRowsArgs move{};
  move.source = static_cast<const char*>(first.x);
  move.target = static_cast<char*>(second.out);
  move.source_stride = first.x_stride * 2;
  move.target_stride = move.row_bytes = row_bytes;
  move.num_source_rows = sort.num_tokens;
  move.num_target_rows = sort.num_pairs;
  move.places = places;
  move.top_k = sort.top_k;
  move.num_valid = {sort.offsets + sort.num_listed, 0, 0, false};
  first.x = move.target;
  first.x_stride = first.weight.k;
  first.out = a.gated.result;
  first.out_stride = a.gated.width;
  const auto multiply = [&](const PackedGemmArgs& product, bool activates, bool asks) {
    const int segments = packed_gemm_sm90::segments_of(product.weight, num_sms(launch.device));
    return packed_gemm_of_groups_sm90(product, {sort.num_listed, sort.offsets, activates}, segments, asks, launch);
  };
  if (!multiply(first, true, true) || !multiply(second, false, true)) return false;
  sort_pairs_cuda(sort, launch);
  move_rows_cuda(move, launch);
  multiply(first, true, false);
  multiply(second, false, false);
  a.sum.ids = {};
  a.sum.places = places;
  a.sum.num_rows = sort.num_pairs;
  a.sum.numbers_are_old = true;
  sum_rows_cuda(a.sum, launch);
  return true;
}

void run(FusedMoeArgs& a, const Launch& launch) {
  if (a.has_products() && (few_pairs_cuda(a, launch) || run_many(a, launch))) return;
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
