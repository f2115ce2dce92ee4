#include "quantization/static_quant.h"

#include "core/group_size.h"
#include "pykv/quantization.h"
#include "quantization/code_inputs.h"
#include "quantization/row_quant.h"

namespace pykv {
namespace {

StaticQuantArgs arguments(const CodeRows& m) {
  StaticQuantArgs args{};
  args.dtype = m.input.type();
  args.codes = kind_of(m.codes);
  args.input = m.input.data();
  args.out = m.codes.data();
  args.input_rows = m.input.rows();
  args.out_rows = m.codes.rows();
  args.rows = m.rows;
  args.width = m.width;
  args.number = {nullptr, 1.0f};
  args.group_rows = args.group_columns = 1;
  return args;
}

// One scale; those of rows or of columns; or of rectangles.
void set_scales(StaticQuantArgs& args, Call& call, const DLTensor* scale, int64_t group_rows, int64_t group_columns) {
  if (!scale || Tensor("scale", scale).numel() == 1) {
    args.number = call.parameter("scale", scale);
    return;
  }
  Tensor s = call.read("scale", scale).dtype({DType::kFloat32}).rank_between(1, 2);
  args.scales = static_cast<const float*>(s.data());
  if (s.ndim() == 1) {
    const bool by_row = group_rows == 1 && group_columns == -1, by_column = group_rows == -1 && group_columns == 1;
    if (!by_row && !by_column)
      s.fail(
          PYKV_VALUE_ERROR,
          "of 1 dimension must be those of rows (group_rows 1, group_columns -1) or of columns (-1, 1), got group_rows "
          "%" PRId64 ", group_columns %" PRId64,
          group_rows, group_columns);
    Dim wanted{by_row ? "num_rows" : "width", by_row ? args.rows : args.width};
    s.shape(wanted);
    if (by_row) args.group_columns = args.width > 0 ? args.width : 1;
    if (by_column) args.group_rows = args.rows > 0 ? args.rows : 1;
    args.scale_row = by_row ? s.stride(0) : 0;
    args.scale_column = by_column ? s.stride(0) : 0;
    return;
  }
  if (args.rows == 0 || args.width == 0) return;  // there is no element that has a scale
  args.group_rows = group_size("group_rows", group_rows, args.rows, s.size(0));
  args.group_columns = group_size("group_columns", group_columns, args.width, s.size(1));
  Dim rows{"groups of rows", (args.rows + args.group_rows - 1) / args.group_rows};
  Dim columns{"groups of columns", (args.width + args.group_columns - 1) / args.group_columns};
  s.shape(rows, columns);
  args.scale_row = s.stride(0);
  args.scale_column = s.stride(1);
}

void run(Call& call, const StaticQuantArgs& args, void* stream) {
  call.run(stream, args, static_quant_cpu, PYKV_CUDA(static_quant_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_static_scaled_int8_quant(DLTensor* result, const DLTensor* input, const DLTensor* scale,
                                          const DLTensor* azp, void* stream) {
  return guarded("static_scaled_int8_quant", [&](Call& call) {
    const CodeRows m(call, "result", result, input, {DType::kInt8});
    StaticQuantArgs args = arguments(m);
    args.number = call.parameter("scale", scale);
    args.shifted = azp != nullptr;
    args.divides = !args.shifted;
    if (azp) args.zero_point = static_cast<const int32_t*>(single(call, "azp", azp, DType::kInt32));
    if (!m.empty()) run(call, args, stream);
  });
}

pykv_status pykv_static_scaled_fp8_quant(DLTensor* result, const DLTensor* input, const DLTensor* scale,
                                         int64_t group_rows, int64_t group_columns, void* stream) {
  return guarded("static_scaled_fp8_quant", [&](Call& call) {
    const CodeRows m(call, "result", result, input, kFp8Codes);
    StaticQuantArgs args = arguments(m);
    set_scales(args, call, scale, group_rows, group_columns);
    if (!m.empty()) run(call, args, stream);
  });
}

pykv_status pykv_dynamic_scaled_fp8_quant(DLTensor* result, const DLTensor* input, DLTensor* scale, void* stream) {
  return guarded("dynamic_scaled_fp8_quant", [&](Call& call) {
    const CodeRows m(call, "result", result, input, kFp8Codes);
    auto* const scale_out = static_cast<float*>(single(call, "scale", scale, DType::kFloat32));
    if (m.empty()) return;
    StaticQuantArgs args = arguments(m);
    const auto follow = [&](const Rows& rows) {  // as if they were one row
      return m.rows == 1 || (rows.size1 == 1 && rows.size2 == 1 && rows.stride0 == m.width);
    };
    // What one block holds is read once.
    if (call.on_cuda() && m.input.numel() <= 16384 && follow(args.input_rows) && follow(args.out_rows)) {
      RowQuantArgs row{};
      row.dtype = args.dtype;
      row.codes = args.codes;
      row.rule = RowRule::kMultiply;
      row.input = args.input;
      row.out = args.out;
      row.scales = scale_out;
      row.rows = 1;
      row.width = m.input.numel();
      row.input_rows = row.out_rows = {1, 1, row.width, 0, 0};
      call.run(stream, row, row_quant_cpu, PYKV_CUDA(row_quant_cuda));
      return;
    }
    args.from_largest = true;
    args.scale_out = scale_out;
    run(call, args, stream);
  });
}
