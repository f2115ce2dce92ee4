#include "moe/fused_moe_w8a8.h"

#include <cmath>
#include <memory>

#include "moe/layer_inputs.h"

namespace pykv {
namespace {

Rows rows_of(int64_t stride) { return {1, 1, stride, 0, 0}; }

void run(const RowCoder& coder, const QuantisedMoeTwins& twins, const Launch& launch) {
  if (coder.way == RowCoding::kGroups) return twins.groups(coder.groups, launch);
  if (coder.way == RowCoding::kRows) return twins.rows(coder.rows, launch);
  twins.number(coder.number, launch);
}

// Where a coder's rows lie, and their records.
void set_rows(RowCoder& coder, const void* from, int64_t stride, char* records, const RecordLayout& layout,
              int64_t count, int64_t width) {
  const auto set = [&](auto& args) {
    args.input = from;
    args.out = records;
    args.input_rows = rows_of(stride);
    args.out_rows = rows_of(layout.bytes);
    args.rows = count;
    args.width = width;
  };
  set(coder.groups);
  set(coder.rows);
  set(coder.number);
  auto* const scales = reinterpret_cast<float*>(records + layout.scales_at);
  coder.groups.scales = scales;
  coder.groups.scale_rows = rows_of(layout.bytes / 4);
  coder.groups.scale_group = 1;
  coder.groups.code_groups = coder.groups.scale_groups = width / RecordLayout::kBlock;
  coder.rows.scales = scales;
  coder.rows.scale_stride = layout.bytes / 4;
}

// A product's rows and their scales.
void set_records(ScaledMmArgs& product, const char* records, const RecordLayout& layout) {
  product.a = reinterpret_cast<const uint8_t*>(records);
  product.a_stride = layout.bytes;
  product.a_scales = {records + layout.scales_at, layout.bytes / 4, product.in_blocks ? 1 : 0, false, 0};
}

// Weights in 8 bits and their scales, as the product of rows in groups takes them.
struct QuantisedWeights {
  const char *name, *scale_name, *number_name, *bias_name;
  const DLTensor *array, *scale;
  const DLTensor *number, *bias;  // may be null; the first: of the product's rows
};

ScaledMmArgs scaled_product(const Layer& layer, const QuantisedWeights& from, Dim& experts, Dim& n, Dim& k) {
  constexpr int64_t kBlock = ScaledMmArgs::kBlock, kMostExperts = 512;
  const Tensor w = layer.call.read(from.name, from.array)
                       .dtype({DType::kFloat8E4M3, DType::kUInt8, DType::kInt8})
                       .shape(experts, n, k)
                       .contiguous_rows();
  if (experts > kMostExperts)
    fail(PYKV_NOT_IMPLEMENTED,
         "%s: more than %" PRId64 " experts are not supported with 8-bit activations, got %" PRId64, from.name,
         kMostExperts, static_cast<int64_t>(experts));
  ScaledMmArgs args{};
  args.is_int8 = w.type() == DType::kInt8;
  args.out_dtype = layer.from.type();
  args.b = static_cast<const uint8_t*>(w.data());
  args.n = n;
  args.k = k;
  args.b_along_k = 1;
  args.b_along_n = w.stride(1);
  args.b_group = w.stride(0);
  args.groups.count = experts;

  Dim one{"1", 1};
  Tensor s = layer.call.read(from.scale_name, from.scale).dtype({DType::kFloat32}).rank_between(1, 3).dim(0, experts);
  if (s.ndim() == 3 && (s.size(2) != 1 || s.size(1) != n)) {
    Dim n_blocks{"blocks of 128 rows", (n + kBlock - 1) / kBlock}, k_blocks{"blocks of 128 columns", args.blocks()};
    s.dim(1, n_blocks).dim(2, k_blocks);
    if (k % kBlock != 0)
      fail(PYKV_VALUE_ERROR, "%s: with scales of blocks the columns must be a multiple of %" PRId64 ", got %" PRId64,
           from.name, kBlock, static_cast<int64_t>(k));
    if (from.number) fail(PYKV_VALUE_ERROR, "%s: must be None where weights have scales of blocks", from.number_name);
    args.in_blocks = true;
    args.b_scales = {s.data(), s.stride(1), s.stride(2), false, s.stride(0)};
  } else {
    const bool one_each = s.ndim() == 1 || (s.ndim() == 2 && s.size(1) == 1);
    if (!one_each) s.dim(1, n);
    args.b_scales = {s.data(), one_each ? 0 : s.stride(1), 0, false, s.stride(0)};
  }
  if (from.bias) {
    const Tensor bias = layer.call.read(from.bias_name, from.bias).like(layer.from).shape(experts, n).contiguous_rows();
    args.bias = bias.data();
    args.bias_group = bias.stride(0);
  }
  return args;
}

// How the rows of such a product become codes.
RowCoder row_coder(const Layer& layer, const ScaledMmArgs& product, const QuantisedWeights& from, RowSource source) {
  RowCoder coder{};
  const QuantCode codes = product.is_int8 ? QuantCode::kInt8 : QuantCode::kE4M3;
  coder.way = product.in_blocks ? RowCoding::kGroups : from.number ? RowCoding::kNumber : RowCoding::kRows;
  coder.groups.dtype = coder.rows.dtype = coder.number.dtype = layer.from.type();
  coder.groups.codes = coder.rows.codes = coder.number.codes = codes;
  coder.groups.source = source;
  coder.groups.rule = {QuantScale::kFloat, ExponentRule::kCeil, largest_code(codes), 1e-10f / largest_code(codes),
                       largest_exponent(codes)};
  coder.groups.given = {nullptr, INFINITY};
  coder.groups.group_size = ScaledMmArgs::kBlock;
  coder.rows.rule = product.is_int8 ? RowRule::kInt8 : RowRule::kDivide;
  coder.number.divides = product.is_int8;
  coder.number.number = from.number ? layer.call.parameter(from.number_name, from.number) : Parameter{nullptr, 1.0f};
  coder.number.group_rows = coder.number.group_columns = 1;
  return coder;
}

}  // namespace

void QuantisedMoeArgs::use(void* memory) {
  const int64_t pairs = sort.num_pairs, inner = second.k, hidden = first.k, experts = sort.num_listed;
  const QuantisedWorkspace layout(sort.num_tokens, pairs, experts, first.n, inner, hidden);
  auto* const base = static_cast<char*>(memory);
  sort.offsets = reinterpret_cast<int32_t*>(base + layout.offsets);
  sort.sorted = reinterpret_cast<int32_t*>(base + layout.sorted);
  sort.places = reinterpret_cast<int32_t*>(base + layout.places);
  const int32_t* const taken = sort.offsets + experts;
  void* const rows = base + layout.rows;
  void* const activated = base + layout.activated;

  const RecordLayout of_x(hidden, in_blocks), of_activated(inner, in_blocks);
  set_rows(first_coder, first_coder.groups.input, first_coder.groups.input_rows.stride0, base + layout.tokens, of_x,
           sort.num_tokens, hidden);
  records.layout = of_x;
  records.tokens = base + layout.tokens;
  records.pairs = base + layout.pairs;
  records.sorted = sort.sorted;
  records.taken = taken;
  records.num_pairs = pairs;
  records.top_k = sort.top_k;
  records.next_scale = reinterpret_cast<float*>(base + layout.scale);

  const bool fused = activates_in_coder();
  set_rows(second_coder, fused ? rows : activated, fused ? 2 * inner : inner, base + layout.codes, of_activated, pairs,
           inner);
  second_coder.groups.valid = {{taken, 0, false}, pairs, 1};  // behind them lie no pairs, and nobody has written
  second_coder.rows.valid = second_coder.number.valid = {taken};

  set_records(first, base + layout.pairs, of_x);
  set_records(second, base + layout.codes, of_activated);
  if (second_coder.way == RowCoding::kNumber) second.a_scales = {records.next_scale, 0, 0, false, 0};
  for (ScaledMmArgs* product : {&first, &second}) {
    product->groups.begins = {sort.offsets, 1, false};
    product->m = pairs;
    product->out = rows;
    product->out_stride = product->n;
  }

  gated.result = elementwise.out = activated;
  gated.input = elementwise.input = rows;
  gated.result_rows = elementwise.out_rows = elementwise.input_rows = rows_of(inner);
  gated.input_rows = rows_of(2 * inner);
  gated.num_rows = elementwise.num_rows = pairs;
  gated.mask = elementwise.mask = {{taken, 1, false}, pairs};
  if (activation->is_gated())
    gated.width = gated.up = inner;
  else
    elementwise.width = inner;
  sum.rows = rows;
  sum.row_stride = sum.width;
  sum.num_rows = pairs;
  sum.places = {sort.places, sort.top_k, 1, false};
}

void run_quantised_moe(const QuantisedMoeArgs& a, const QuantisedMoeTwins& twins, const Launch& launch) {
  SumRowsArgs sum = a.sum;
  if (a.sort.num_pairs != 0) twins.sort(a.sort, launch);
  if (a.sort.num_pairs != 0 && a.sort.num_listed != 0 && a.second.k != 0) {
    if (!a.in_blocks || !twins.block_records ||
        !twins.block_records({a.records, a.first_coder.groups, a.sort.places}, launch)) {
      run(a.first_coder, twins, launch);
      twins.records(a.records, launch);
    }
    twins.multiply(a.first, launch);
    if (!a.activates_in_coder()) {
      if (a.gated.width != 0) (twins.on_cuda ? a.activation->gated_cuda : a.activation->gated_cpu)(a.gated, launch);
      if (a.elementwise.width != 0) (twins.on_cuda ? a.activation->cuda : a.activation->cpu)(a.elementwise, launch);
    }
    run(a.second_coder, twins, launch);
    twins.multiply(a.second, launch);
    sum.numbers_are_old = true;
  } else {
    sum.top_k =
        0;  // without experts all pairs are dropped; rows without columns have no scales that a product could read
  }
  twins.sum(sum, launch);
}

void quantised_moe_cpu(const QuantisedMoeArgs& args, const Launch& launch) {
  QuantisedMoeArgs a = args;
  std::unique_ptr<char[]> own;
  if (!args.workspace) own.reset(new char[static_cast<size_t>(args.workspace_bytes)]);
  a.use(args.workspace ? args.workspace : own.get());
  run_quantised_moe(a,
                    {sort_pairs_cpu, group_quant_cpu, row_quant_cpu, static_quant_cpu, code_records_cpu, scaled_mm_cpu,
                     sum_rows_cpu, nullptr, false},
                    launch);
}

void call_quantised_moe(Layer& layer, const LayerOptions& options, const QuantisedLayer& given) {
  const QuantisedWeights first{"w1",     "w1_scale",     "a1_scale",     "w1_bias",
                               given.w1, given.w1_scale, given.a1_scale, given.w1_bias};
  const QuantisedWeights second{"w2",     "w2_scale",     "a2_scale",     "w2_bias",
                                given.w2, given.w2_scale, given.a2_scale, given.w2_bias};
  if (given.w1_bias && options.weights_on_input)
    fail(PYKV_NOT_IMPLEMENTED, "w1_bias: is not supported with 8-bit activations and apply_router_weight_on_input");
  QuantisedMoeArgs args{};
  args.first = scaled_product(layer, first, layer.experts, layer.width, layer.hidden);
  Dim inner = layer.inner();
  args.second = scaled_product(layer, second, layer.experts, layer.hidden, inner);
  if (args.first.is_int8 != args.second.is_int8 || args.first.in_blocks != args.second.in_blocks)
    fail(PYKV_VALUE_ERROR, "w2: codes and scales must be of the kind of those of w1");
  if (args.second.k == 0 && given.w2_bias)
    fail(PYKV_NOT_IMPLEMENTED, "w2_bias: is not supported with 8-bit weights that have no columns");
  args.in_blocks = args.first.in_blocks;
  args.sort = layer.sort(options);
  const Tensor weights = layer.weights(options, args.sort);

  const bool fused = args.in_blocks && layer.activation.gated_cpu == named_activation("silu").gated_cpu;
  args.first_coder = row_coder(layer, args.first, first, RowSource::kElements);
  args.second_coder = row_coder(layer, args.second, second, fused ? RowSource::kSiluAndMul : RowSource::kElements);
  args.first_coder.groups.input = layer.from.data();
  args.first_coder.groups.input_rows.stride0 = layer.from.stride(0);
  const int64_t num_experts = layer.num_experts(options.expert_map);
  for (ScaledMmArgs* product : {&args.first, &args.second}) {
    product->groups.expected_rows = std::max<int64_t>(1, (args.sort.num_pairs + num_experts - 1) / num_experts);
    product->groups.report_begins = "fused_moe: topk_ids";
  }
  args.records.is_static = args.first_coder.way == RowCoding::kNumber;
  args.records.number = args.first_coder.number.number;
  args.records.copies_number = args.second_coder.way == RowCoding::kNumber;
  args.records.next_number = args.second_coder.number.number;
  if (options.weights_on_input) {
    args.records.factors = static_cast<const float*>(weights.data());
    args.records.factors_token_stride = weights.stride(0);
    args.records.factors_stride = weights.stride(1);
  }
  layer.set_rest(args, weights, options);
  args.workspace_bytes =
      QuantisedWorkspace(layer.tokens, args.sort.num_pairs, layer.experts, layer.width, inner, layer.hidden).bytes;
  layer.run(args, options, quantised_moe_cpu, PYKV_CUDA(quantised_moe_cuda));
}

}  // namespace pykv
