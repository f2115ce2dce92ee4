#include "moe/fused_moe.h"

#include <cmath>
#include <memory>

#include "moe/layer_inputs.h"
#include "pykv/moe.h"

namespace pykv {
namespace {

// Pairs of a tile of packed weights: experts that have some more than that read their weights again.
int64_t pairs_of_packed_tile(int64_t num_pairs, int64_t num_experts) {
  const int64_t each = num_pairs / num_experts;
  return each <= 4 ? 8 : each <= 12 ? 16 : each <= 24 ? 32 : each <= 80 ? 64 : 128;
}

// ... and of plain ones: those with which an expert reads least, 256 rows of its weight and a tile's rows of x for each tile.  Numbers
// of pairs vary from expert to expert as those of balls in boxes do.
int64_t pairs_of_tile(int64_t num_pairs, int64_t num_experts) {
  const double each = static_cast<double>(num_pairs) / static_cast<double>(num_experts), spread = std::sqrt(2 * each);
  int64_t best = 8;
  double least = HUGE_VAL;
  for (const int64_t tile : {8, 16, 32, 48, 64, 96, 144}) {
    const auto size = static_cast<double>(tile);
    double tiles = each / size + 0.5;
    if (spread < size) {  // the sum of the chances that there is one more
      tiles = std::max(std::floor((each - 3 * spread) / size), 0.0);
      for (double before = tiles * size; before < each + 3 * spread; before += size)
        tiles += 0.5 * std::erfc((before - each) / spread);
    }
    const double read = tiles * (256 + size);
    if (read < least) {
      least = read;
      best = tile;
    }
  }
  return best;
}

void fused_moe_cpu(const FusedMoeArgs& args, const Launch& launch) {
  FusedMoeArgs a = args;
  std::unique_ptr<char[]> own;
  if (!args.workspace) own.reset(new char[static_cast<size_t>(args.workspace_bytes)]);
  a.use(args.workspace ? args.workspace : own.get());
  if (a.sort.num_pairs != 0) sort_pairs_cpu(a.sort, launch);
  if (a.has_products()) {
    expert_product_cpu(a.first, launch);
    if (a.gated.width != 0) a.activation->gated_cpu(a.gated, launch);
    if (a.elementwise.width != 0) a.activation->cpu(a.elementwise, launch);
    expert_product_cpu(a.second, launch);
  }
  sum_rows_cpu(a.sum, launch);
}

}  // namespace

void FusedMoeArgs::use(void* memory) {
  const int64_t pairs = sort.num_pairs, inner = activation->is_gated() ? first.n() / 2 : first.n();
  const WorkspaceLayout layout(pairs, sort.num_listed, first.n(), inner, second.n());
  auto* const base = static_cast<char*>(memory);
  sort.sorted = reinterpret_cast<int32_t*>(base + layout.sorted);
  sort.blocks = reinterpret_cast<int32_t*>(base + layout.blocks);
  sort.num_padded = reinterpret_cast<int32_t*>(base + layout.taken);
  sort.places = reinterpret_cast<int32_t*>(base + layout.places);
  void* const rows = base + layout.rows;
  void* const activated = base + layout.activated;

  TileMap tiles{};
  tiles.rows = sort.sorted;
  tiles.weights = sort.blocks;
  tiles.taken = sort.num_padded;
  tiles.num_blocks = sort.num_blocks;
  tiles.block_size = sort.block_size;
  tiles.top_k = sort.top_k;
  const PackedGemmArgs& given = first.packed;
  tiles.factors = given.map.factors;
  tiles.factors_token_stride = given.map.factors_token_stride;
  tiles.factors_stride = given.map.factors_stride;
  first.set_rows(tiles, pairs, given.x, given.x_stride, rows, first.n());
  tiles.factors = nullptr;
  tiles.top_k = 1;
  second.set_rows(tiles, pairs, activated, inner, rows, second.n());

  const auto compact = [](int64_t width) { return Rows{1, 1, width, 0, 0}; };
  if (activation->is_gated()) {
    gated.result = activated;
    gated.input = rows;
    gated.result_rows = compact(inner);
    gated.input_rows = compact(2 * inner);
    gated.num_rows = pairs;
    gated.width = gated.up = inner;
    gated.mask.places = sort.places;
  } else {
    elementwise.out = activated;
    elementwise.input = rows;
    elementwise.out_rows = elementwise.input_rows = compact(inner);
    elementwise.num_rows = pairs;
    elementwise.width = inner;
    elementwise.mask.places = sort.places;
  }
  sum.rows = rows;
  sum.row_stride = sum.width;
  sum.token_stride = sum.width * sort.top_k;
  sum.ids = {sort.places, sort.top_k, 1, false};
}

}  // namespace pykv

using namespace pykv;

pykv_status pykv_fused_moe(DLTensor* out, const DLTensor* x, const DLTensor* w1, const DLTensor* w2,
                           const DLTensor* topk_weights, const DLTensor* topk_ids, const char* activation,
                           const DLTensor* w1_bias, const DLTensor* w2_bias, const DLTensor* expert_map,
                           const char* w1_format, const char* w2_format, bool apply_router_weight_on_input,
                           double clamp_limit, double alpha, double beta, double situ_beta, double situ_linear_beta,
                           const DLTensor* w1_scale, const DLTensor* w2_scale, const DLTensor* a1_scale,
                           const DLTensor* a2_scale, DLTensor* workspace, void* stream) {
  return guarded("fused_moe", [&](Call& call) {
    Layer layer(call, out, x, activation);
    const LayerOptions options{topk_weights,
                               topk_ids,
                               expert_map,
                               {clamp_limit, alpha, beta, situ_beta, situ_linear_beta},
                               apply_router_weight_on_input,
                               workspace,
                               stream};
    if (w1_scale || w2_scale || a1_scale || a2_scale) {
      if (*required("w1_format", w1_format) || *required("w2_format", w2_format))
        fail(PYKV_VALUE_ERROR, "w1_scale: must be None with packed weights, which have their scales");
      return call_quantised_moe(layer, options, {w1, w2, w1_scale, w2_scale, a1_scale, a2_scale, w1_bias, w2_bias});
    }
    Dim &experts = layer.experts, &width = layer.width, &hidden = layer.hidden;
    FusedMoeArgs args{};
    args.first =
        product_args(call, layer.from, {"w1", "w1_format", "w1_bias", w1, w1_format, w1_bias}, experts, width, hidden);
    Dim inner = layer.inner();
    args.second =
        product_args(call, layer.from, {"w2", "w2_format", "w2_bias", w2, w2_format, w2_bias}, experts, hidden, inner);
    SortPairsArgs& sort = args.sort = layer.sort(options);
    const Tensor weights = layer.weights(options, sort);
    const bool is_packed = args.first.is_packed || args.second.is_packed;
    sort.block_size = (is_packed ? pairs_of_packed_tile : pairs_of_tile)(sort.num_pairs, layer.num_experts(expert_map));
    const int64_t most = sort.num_pairs + std::min<int64_t>(sort.num_pairs, experts) * (sort.block_size - 1);
    if (most > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "topk_ids: more than some 2^31 pairs are not supported");
    sort.num_blocks = most / sort.block_size;
    sort.capacity = sort.num_blocks * sort.block_size;

    args.first.packed.x = layer.from.data();
    args.first.packed.x_stride = layer.from.stride(0);
    if (apply_router_weight_on_input) {
      TileMap& first_map = args.first.packed.map;
      first_map.factors = static_cast<const float*>(weights.data());
      first_map.factors_token_stride = weights.stride(0);
      first_map.factors_stride = weights.stride(1);
    }
    layer.set_rest(args, weights, options);
    args.workspace_bytes = WorkspaceLayout(sort.num_pairs, experts, width, inner, hidden).bytes;
    layer.run(args, options, fused_moe_cpu, PYKV_CUDA(fused_moe_cuda));
  });
}
