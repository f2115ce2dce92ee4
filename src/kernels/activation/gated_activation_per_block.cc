#include "activation/gated_activation_per_block.h"

#include <cinttypes>
#include <cmath>

#include "core/call.h"
#include "pykv/activation.h"

using namespace pykv;

pykv_status pykv_silu_and_mul_per_block_quant(DLTensor* out, const DLTensor* input, DLTensor* scales,
                                              int64_t group_size, const DLTensor* scale_ub, bool is_scale_transposed,
                                              void* stream) {
  return guarded("silu_and_mul_per_block_quant", [&](Call& call) {
    Dim tokens("num_tokens");
    const Tensor x = call.read("input", input).rank(2).dim(0, tokens).dtype(kFloats).contiguous_rows();
    if (x.size(1) % 2 != 0)
      x.fail(PYKV_VALUE_ERROR, "the last dimension holds two halves and must be even, got shape %s",
             x.shape_string().c_str());
    Dim width("width", x.size(1) / 2);
    const Tensor y = call.write("out", out)
                         .shape(tokens, width)
                         .dtype({DType::kFloat8E4M3, DType::kUInt8, DType::kInt8})
                         .contiguous_rows()
                         .no_overlap_within();
    if (group_size <= 0 || width % group_size != 0)
      fail(PYKV_VALUE_ERROR, "group_size: must be positive and divide width = %" PRId64 ", got %" PRId64,
           static_cast<int64_t>(width), group_size);
    Dim groups("num_groups", width / group_size);
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
    const bool to_int8 = y.type() == DType::kInt8;
    if (scale_ub && to_int8) fail(PYKV_VALUE_ERROR, "scale_ub: is for float8_e4m3fn alone, got out of int8");
    const GatedActivationPerBlockArgs args{
        .dtype = x.type(),
        .out_dtype = to_int8 ? DType::kInt8 : DType::kFloat8E4M3,
        .out = y.data(),
        .input = x.data(),
        .scales = static_cast<float*>(s.data()),
        .out_rows = y.rows(),
        .input_rows = x.rows(),
        .scales_row = s.stride(in_storage_order ? 1 : 0),
        .scales_group = s.stride(in_storage_order ? 0 : 1),
        .num_rows = tokens,
        .width = width,
        .group_size = group_size,
        .most = scale_ub ? call.parameter("scale_ub", scale_ub) : Parameter{nullptr, INFINITY},
    };
    if (tokens == 0 || width == 0) return;
    call.run(stream, args, gated_activation_per_block_cpu, PYKV_CUDA(gated_activation_per_block_cuda));
  });
}
