#include "dequantization/scaled_dequantize.h"

#include <cinttypes>

#include "core/call.h"
#include "core/group_size.h"
#include "pykv/dequantization.h"

namespace pykv {
namespace {

int64_t groups_of(int64_t size, int64_t group) { return (size + group - 1) / group; }

// Output and codes: [rows, columns], or some such matrices.
struct Matrices {
  Dim matrices{"num_matrices"}, rows{"num_rows"}, columns{"num_columns"};
  Tensor output, codes;

  Matrices(Call& call, DLTensor* out, const DLTensor* input, int codes_per_byte,
           std::initializer_list<DType> code_types)
      : output(call.write("out", out)), codes(call.read("input", input)) {
    output.dtype(kFloats).rank_between(2, 3).last_dim(columns).contiguous_rows().no_overlap_within();
    Dim bytes{codes_per_byte == 1 ? "num_columns" : "num_columns / 2", columns / codes_per_byte};
    codes.dtype(code_types).rank(output.ndim()).dim(-2, rows).last_dim(bytes).contiguous_rows();
    output.dim(-2, rows);
    if (output.ndim() == 3) output.dim(0, matrices), codes.dim(0, matrices);
  }
  int64_t count() const { return output.ndim() == 3 ? output.size(0) : 1; }

  ScaledDequantizeArgs arguments(SmallFloat codes_are) const {
    ScaledDequantizeArgs args{};
    args.codes_are = codes_are;
    args.dtype = output.type();
    args.codes = static_cast<const uint8_t*>(codes.data());
    args.output = output.data();
    args.number = {nullptr, 1.0f};
    args.matrices = count();
    args.rows = rows;
    args.columns = columns;
    args.code_row = codes.stride(-2);
    args.output_row = output.stride(-2);
    if (output.ndim() == 3) {
      args.code_matrix = codes.stride(0);
      args.output_matrix = output.stride(0);
    }
    return args;
  }
};

// Scales of `block` neighbours of a row: by strides, or in tiles of 128 rows and 4 groups.
void block_scales(ScaledDequantizeArgs& args, Call& call, const DLTensor* scale, const Matrices& m, int block,
                  bool swizzled, std::initializer_list<DType> types) {
  if (args.columns % block != 0)
    m.output.fail(PYKV_VALUE_ERROR, "the last dimension must be a multiple of %d, got %" PRId64, block, args.columns);
  Tensor s = call.read("scale", scale).dtype(types);
  const int64_t groups = args.columns / block;
  args.scales = s.data();
  args.group_rows = 1;
  args.group_columns = block;
  if (swizzled) {
    s.contiguous();
    args.swizzled_columns = groups_of(groups, 4);
    args.scale_matrix = groups_of(args.rows, 128) * args.swizzled_columns * 512;
    if (s.numel() != args.matrices * args.scale_matrix)
      s.fail(PYKV_VALUE_ERROR,
             "must have %" PRId64 " elements (%" PRId64 " rows and %" PRId64
             " groups of columns, rounded up to multiples of 128 and of 4), got shape %s",
             args.matrices * args.scale_matrix, args.rows, groups, s.shape_string().c_str());
    return;
  }
  s.rank(m.output.ndim());
  Dim columns{"num_columns / block", groups}, rows{"num_rows", args.rows}, matrices{"num_matrices", args.matrices};
  s.dim(-2, rows).last_dim(columns);
  if (s.ndim() == 3) s.dim(0, matrices);
  args.scale_matrix = s.ndim() == 3 ? s.stride(0) : 0;
  args.scale_row = s.stride(-2);
  args.scale_column = s.stride(-1);
}

// Scales in float32: one; of rows or of columns; or of rectangles.
void float_scales(ScaledDequantizeArgs& args, Call& call, const DLTensor* scale, const Matrices& m, int64_t group_rows,
                  int64_t group_columns) {
  args.group_rows = args.group_columns = 1;
  if (!scale || (scale->ndim < 2 && Tensor("scale", scale).numel() == 1)) {
    args.number = call.parameter("scale", scale);
    args.group_columns = args.columns > 0 ? args.columns : 1;
    return;
  }
  Tensor s = call.read("scale", scale).dtype({DType::kFloat32});
  args.scale_is = GroupScale::kFloat;
  args.scales = s.data();
  if (s.ndim() == 1) {
    const bool by_row = group_rows == 1 && group_columns == -1, by_column = group_rows == -1 && group_columns == 1;
    if (m.output.ndim() != 2 || (!by_row && !by_column))
      s.fail(
          PYKV_VALUE_ERROR,
          "of 1 dimension must be those of rows (group_rows 1, group_columns -1) or of columns (-1, 1) of one matrix, "
          "got group_rows %" PRId64 ", group_columns %" PRId64,
          group_rows, group_columns);
    Dim wanted{by_row ? "num_rows" : "num_columns", by_row ? args.rows : args.columns};
    s.shape(wanted);
    args.group_columns = by_row && args.columns > 0 ? args.columns : 1;
    args.group_rows = by_column && args.rows > 0 ? args.rows : 1;
    args.scale_row = by_row ? s.stride(0) : 0;
    args.scale_column = by_column ? s.stride(0) : 0;
    return;
  }
  s.rank(m.output.ndim());
  args.group_rows = group_size("group_rows", group_rows, args.rows, s.size(-2));
  args.group_columns = group_size("group_columns", group_columns, args.columns, s.size(-1));
  Dim rows{"groups of rows", groups_of(args.rows, args.group_rows)};
  Dim columns{"groups of columns", groups_of(args.columns, args.group_columns)};
  Dim matrices{"num_matrices", args.matrices};
  s.dim(-2, rows).last_dim(columns);
  if (s.ndim() == 3) s.dim(0, matrices);
  args.scale_matrix = s.ndim() == 3 ? s.stride(0) : 0;
  args.scale_row = s.stride(-2);
  args.scale_column = s.stride(-1);
}

void run(Call& call, const ScaledDequantizeArgs& args, void* stream) {
  if (args.matrices * args.rows * args.columns == 0) return;
  call.run(stream, args, scaled_dequantize_cpu, PYKV_CUDA(scaled_dequantize_cuda));
}

}  // namespace
}  // namespace pykv

pykv_status pykv_fp8_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale, int64_t group_rows,
                                int64_t group_columns, void* stream) {
  using namespace pykv;
  return guarded("fp8_dequantize", [&](Call& call) {
    const Matrices m(call, out, input, 1, {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUInt8});
    ScaledDequantizeArgs args =
        m.arguments(m.codes.type() == DType::kFloat8E5M2 ? SmallFloat::kE5M2 : SmallFloat::kE4M3);
    float_scales(args, call, scale, m, group_rows, group_columns);
    run(call, args, stream);
  });
}

pykv_status pykv_mxfp8_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                  bool is_sf_swizzled_layout, void* stream) {
  using namespace pykv;
  return guarded("mxfp8_dequantize", [&](Call& call) {
    const Matrices m(call, out, input, 1, {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kUInt8});
    ScaledDequantizeArgs args =
        m.arguments(m.codes.type() == DType::kFloat8E5M2 ? SmallFloat::kE5M2 : SmallFloat::kE4M3);
    args.scale_is = GroupScale::kE8M0;
    block_scales(args, call, scale, m, 32, is_sf_swizzled_layout, {DType::kUInt8});
    run(call, args, stream);
  });
}

pykv_status pykv_mxfp4_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                  bool is_sf_swizzled_layout, void* stream) {
  using namespace pykv;
  return guarded("mxfp4_dequantize", [&](Call& call) {
    const Matrices m(call, out, input, 2, {DType::kUInt8});
    ScaledDequantizeArgs args = m.arguments(SmallFloat::kE2M1);
    args.scale_is = GroupScale::kE8M0;
    block_scales(args, call, scale, m, 32, is_sf_swizzled_layout, {DType::kUInt8});
    run(call, args, stream);
  });
}

pykv_status pykv_nvfp4_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                  const DLTensor* global_scale, bool is_sf_swizzled_layout, void* stream) {
  using namespace pykv;
  return guarded("nvfp4_dequantize", [&](Call& call) {
    const Matrices m(call, out, input, 2, {DType::kUInt8});
    ScaledDequantizeArgs args = m.arguments(SmallFloat::kE2M1);
    args.scale_is = GroupScale::kE4M3;
    block_scales(args, call, scale, m, 16, is_sf_swizzled_layout, {DType::kFloat8E4M3, DType::kUInt8});
    args.number = call.parameter("global_scale", global_scale);
    run(call, args, stream);
  });
}
