#include "quantization/group_quant.h"

#include <algorithm>
#include <cmath>

#include "pykv/activation.h"
#include "pykv/quantization.h"
#include "quantization/code_inputs.h"

namespace pykv {
namespace {

// Of rows whose codes may be in more rows.
GroupQuantArgs arguments(const Tensor& input, const Tensor& codes, int64_t rows, int64_t width, int64_t group_size) {
  if (group_size <= 0 || width % group_size != 0)
    fail(PYKV_VALUE_ERROR, "group_size: must be positive and divide width = %" PRId64 ", got %" PRId64, width,
         group_size);
  GroupQuantArgs args{};
  args.dtype = input.type();
  args.codes = kind_of(codes);
  args.input = input.data();
  args.out = codes.data();
  args.input_rows = input.rows();
  args.out_rows = codes.rows();
  args.rows = rows;
  args.width = width;
  args.group_size = group_size;
  args.code_groups = args.scale_groups = width / group_size;
  args.given = {nullptr, INFINITY};
  return args;
}
GroupQuantArgs arguments(const CodeRows& m, int64_t group_size) {
  return arguments(m.input, m.codes, m.rows, m.width, group_size);
}

// least: what the largest magnitude counts as at least.
ScaleRule scale_rule(QuantScale kind, QuantCode codes, float largest, double least) {
  return {kind, ExponentRule::kCeil, largest, static_cast<float>(least) / largest, largest_exponent(codes)};
}

// The code that the largest number becomes.
float largest_given(QuantCode codes, const char* least_name, const char* most_name, double least, double most) {
  const float largest = largest_code(codes);
  number(least_name, least);
  number(most_name, most);
  if (most == 0.0) most = largest;
  if (!(most > 0.0 && most <= largest))
    fail(PYKV_VALUE_ERROR, "%s: must be positive and at most %g, got %g", most_name, largest, most);
  if (least != 0.0 && (is_int8(codes) ? !(least <= -most) : least != -most))
    fail(PYKV_VALUE_ERROR, "%s: must be %s -%s = %g, got %g", least_name, is_int8(codes) ? "at most" : "", most_name,
         -most, least);
  return static_cast<float>(most);
}

void check_eps(double eps) {
  number("eps", eps);
  if (!(eps >= 0.0)) fail(PYKV_VALUE_ERROR, "eps: must not be negative, got %g", eps);
}

// Scales in fp32 of each group, of the rows of x; or of all of them in one dimension.
void set_float_scales(GroupQuantArgs& args, Call& call, const char* name, const Tensor& x, DLTensor* scales) {
  Tensor s = call.write(name, scales).dtype({DType::kFloat32}).no_overlap_within();
  if (s.ndim() == 2) {
    Dim rows{"num_rows", args.rows};
    s.dim(0, rows);
  } else {
    same_rows(s, x);
  }
  Dim groups{"width / group_size", args.scale_groups};
  s.last_dim(groups);
  args.scales = s.data();
  args.scale_rows = s.rows();
  args.scale_group = s.stride(-1);
}

// Four exponents in a word.
void set_packed_scales(GroupQuantArgs& args, Tensor& s, const Tensor& x) {
  s.no_overlap_within();
  same_rows(s, x);
  Dim words{"width / group_size / 4, rounded up", (args.code_groups + 3) / 4};
  s.last_dim(words);
  const Rows rows = s.rows();
  args.scales = s.data();
  args.scale_rows = {rows.size1, rows.size2, rows.stride0 * 4, rows.stride1 * 4, rows.stride2 * 4};
  args.scale_four = s.stride(-1) * 4;
  args.scale_groups = words * 4;
}

void run(Call& call, const GroupQuantArgs& args, void* stream) {
  if (args.rows == 0 || args.width == 0) return;
  call.run(stream, args, group_quant_cpu, PYKV_CUDA(group_quant_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_per_token_group_fp8_quant(const DLTensor* input, DLTensor* output_q, DLTensor* output_s,
                                           int64_t group_size, double eps, double fp8_min, double fp8_max,
                                           bool scale_ue8m0, void* stream) {
  return guarded("per_token_group_fp8_quant", [&](Call& call) {
    const CodeRows m(call, "output_q", output_q, input, kFp8Codes);
    GroupQuantArgs args = arguments(m, group_size);
    check_eps(eps);
    const float largest = largest_given(args.codes, "fp8_min", "fp8_max", fp8_min, fp8_max);
    args.rule = scale_rule(scale_ue8m0 ? QuantScale::kPowerOfTwo : QuantScale::kFloat, args.codes, largest, eps);
    set_float_scales(args, call, "output_s", m.input, output_s);
    run(call, args, stream);
  });
}

pykv_status pykv_per_token_group_fp8_quant_packed(const DLTensor* input, DLTensor* output_q, DLTensor* output_s_packed,
                                                  int64_t group_size, double eps, double fp8_min, double fp8_max,
                                                  void* stream) {
  return guarded("per_token_group_fp8_quant_packed", [&](Call& call) {
    Dim rows{"num_rows"}, width{"width"};
    const Tensor x = call.read("input", input).dtype(kFloats).shape(rows, width).contiguous_rows();
    const Tensor q = call.write("output_q", output_q)
                         .dtype(kFp8Codes)
                         .rank(2)
                         .last_dim(width)
                         .contiguous_rows()
                         .no_overlap_within()
                         .apart_from(x);
    if (q.size(0) < rows)
      q.fail(PYKV_VALUE_ERROR, "must have at least num_rows = %" PRId64 " rows, got shape %s",
             static_cast<int64_t>(rows), q.shape_string().c_str());
    GroupQuantArgs args = arguments(x, q, rows, width, group_size);
    Tensor s = call.write("output_s_packed", output_s_packed).dtype({DType::kInt32});
    check_eps(eps);
    const float largest = largest_given(args.codes, "fp8_min", "fp8_max", fp8_min, fp8_max);
    args.rule = scale_rule(QuantScale::kE8M0, args.codes, largest, eps);
    args.out_rows = {1, 1, q.stride(0), 0, 0};
    args.zero_rows = q.size(0) - rows;
    set_packed_scales(args, s, x);
    run(call, args, stream);
  });
}

pykv_status pykv_per_token_group_quant_int8(const DLTensor* input, DLTensor* output_q, DLTensor* output_s,
                                            int64_t group_size, double eps, double int8_min, double int8_max,
                                            bool truncates, void* stream) {
  return guarded("per_token_group_quant_int8", [&](Call& call) {
    const CodeRows m(call, "output_q", output_q, input, {DType::kInt8});
    GroupQuantArgs args = arguments(m, group_size);
    check_eps(eps);
    if (truncates) args.codes = QuantCode::kInt8Truncated;
    const float largest = largest_given(args.codes, "int8_min", "int8_max", int8_min, int8_max);
    args.rule = scale_rule(QuantScale::kFloat, args.codes, largest, eps);
    set_float_scales(args, call, "output_s", m.input, output_s);
    run(call, args, stream);
  });
}

pykv_status pykv_situ_and_mul_quant(DLTensor* out, DLTensor* scale, const DLTensor* input, double beta,
                                    double linear_beta, int64_t group_size, const DLTensor* num_valid_tokens,
                                    int64_t topk, void* stream) {
  return guarded("situ_and_mul_quant", [&](Call& call) {
    CodeRows m(call, "out", out, input, kFp8Codes, 2);
    m.input.rank(2);
    GroupQuantArgs args = arguments(m, group_size);
    args.source = RowSource::kSituAndMul;
    args.beta = number("beta", beta);
    args.linear_beta = number("linear_beta", linear_beta);
    args.rule = scale_rule(QuantScale::kFloat, args.codes, largest_code(args.codes), 1e-30);
    set_float_scales(args, call, "scale", m.input, scale);
    if (num_valid_tokens) {
      Tensor counts = call.read("num_valid_tokens", num_valid_tokens);
      if (counts.numel() != 1)
        counts.fail(PYKV_VALUE_ERROR, "must have 1 element, got shape %s", counts.shape_string().c_str());
      if (topk < 0) fail(PYKV_VALUE_ERROR, "topk: must not be negative, got %" PRId64, topk);
      args.valid = {counts.index(), args.rows, std::min(topk, args.rows)};
      args.fill_scales = true;
    }
    run(call, args, stream);
  });
}

pykv_status pykv_persistent_masked_m_silu_mul_quant(const DLTensor* input, const DLTensor* counts, DLTensor* y_q,
                                                    DLTensor* y_s, bool use_ue8m0, int64_t group_size, void* stream) {
  return guarded("persistent_masked_m_silu_mul_quant", [&](Call& call) {
    CodeRows m(call, "y_q", y_q, input, kFp8Codes, 2);
    const Tensor& x = m.input.rank(3);
    GroupQuantArgs args = arguments(m, group_size);
    args.source = RowSource::kSiluAndMul;
    Dim experts{"num_experts", x.size(0)};
    args.valid = {call.read("counts", counts).shape(experts).index(), x.size(1), 1};
    Tensor s = call.write("y_s", y_s);
    const float largest = largest_code(args.codes);
    if (s.type() == DType::kInt32) {
      if (!use_ue8m0) s.fail(PYKV_TYPE_ERROR, "int32 is for use_ue8m0");
      args.rule = scale_rule(QuantScale::kE8M0, args.codes, largest, 1e-10);
      set_packed_scales(args, s, x);
    } else {
      args.rule = scale_rule(use_ue8m0 ? QuantScale::kPowerOfTwo : QuantScale::kFloat, args.codes, largest, 1e-10);
      set_float_scales(args, call, "y_s", x, y_s);
    }
    run(call, args, stream);
  });
}

pykv_status pykv_silu_and_mul_per_block_quant(DLTensor* out, const DLTensor* input, DLTensor* scales,
                                              int64_t group_size, const DLTensor* scale_ub, bool is_scale_transposed,
                                              void* stream) {
  return guarded("silu_and_mul_per_block_quant", [&](Call& call) {
    CodeRows m(call, "out", out, input, {DType::kFloat8E4M3, DType::kUInt8, DType::kInt8}, 2);
    m.input.rank(2);
    GroupQuantArgs args = arguments(m, group_size);
    args.source = RowSource::kSiluAndMul;
    const bool int8 = args.codes == QuantCode::kInt8;
    args.rule = scale_rule(QuantScale::kFloat, args.codes, largest_code(args.codes), int8 ? 127 * 0x1p-23 : 1.0 / 512);
    if (scale_ub && int8) fail(PYKV_VALUE_ERROR, "scale_ub: is for float8_e4m3fn alone, got out of int8");
    if (scale_ub) args.given = call.parameter("scale_ub", scale_ub);
    Dim tokens{"num_tokens", args.rows}, groups{"num_groups", args.scale_groups};
    Tensor s = call.write("scales", scales).rank(2).dtype({DType::kFloat32}).no_overlap_within();
    // The storage of the transpose: where both shapes are one, strides tell whether it is it.
    const bool in_storage_order = is_scale_transposed && s.size(0) == groups && s.size(1) == tokens &&
                                  (s.size(0) != tokens || s.size(1) != groups || s.stride(1) == 1);
    if (in_storage_order) {
      s.contiguous();
    } else {
      s.shape(tokens, groups);
    }
    if (!in_storage_order && is_scale_transposed && tokens > 1 && groups > 1 && s.stride(0) != 1)
      s.fail(PYKV_VALUE_ERROR,
             "must be the transpose of a contiguous array where is_scale_transposed, got stride %" PRId64
             " for dimension 0",
             s.stride(0));
    args.scales = s.data();
    args.scale_rows = {1, 1, s.stride(in_storage_order ? 1 : 0), 0, 0};
    args.scale_group = s.stride(in_storage_order ? 0 : 1);
    run(call, args, stream);
  });
}
