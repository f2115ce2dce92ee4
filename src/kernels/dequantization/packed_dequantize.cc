#include "dequantization/packed_dequantize.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/dequantization.h"

namespace pykv {
namespace {

PackedDequantizeArgs arguments(Tensor& output, Tensor& codes, Tensor& zeros, Tensor& scales) {
  PackedDequantizeArgs args{};
  args.dtype = output.type();
  args.codes = static_cast<const uint32_t*>(codes.data());
  args.zeros = static_cast<const uint32_t*>(zeros.data());
  args.scales = scales.data();
  args.output = output.data();
  args.rows = output.size(0);
  args.columns = output.size(1);
  args.groups = scales.size(0);
  args.code_stride = codes.stride(0);
  args.zero_stride = zeros.stride(0);
  args.scale_stride = scales.stride(0);
  args.output_stride = output.stride(0);
  return args;
}

void check_words(Tensor& words, Dim& rows, Dim& columns, const char* what) {
  words.dtype({DType::kInt32}).rank(2).contiguous_rows();
  if (words.size(0) != rows || words.size(1) != columns)
    words.fail(PYKV_VALUE_ERROR, "must have shape [%" PRId64 ", %" PRId64 "] (%s), got %s", int64_t{rows},
               int64_t{columns}, what, words.shape_string().c_str());
}

// Equal groups of consecutive rows.
int64_t equal_groups(const Tensor& scales, int64_t rows) {
  const int64_t groups = scales.size(0);
  if (rows > 0 && (groups == 0 || rows % groups != 0))
    scales.fail(PYKV_VALUE_ERROR,
                "must have as many rows as there are equal groups of the %" PRId64 " rows, got %" PRId64, rows, groups);
  return groups > 0 ? rows / groups : 1;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_awq_dequantize(DLTensor* out, const DLTensor* qweight, const DLTensor* scales, const DLTensor* zeros,
                                void* stream) {
  using namespace pykv;
  return guarded("awq_dequantize", [&](Call& call) {
    Dim rows{"num_rows"}, columns{"num_columns"}, groups{"num_groups"};
    Tensor to = call.write("out", out).dtype(kFloats).shape(rows, columns).contiguous_rows().no_overlap_within();
    if (columns % 8 != 0)
      to.fail(PYKV_VALUE_ERROR, "the number of columns must be a multiple of 8, got %" PRId64, int64_t{columns});
    Dim words{"num_columns / 8", columns / 8};
    Tensor codes = call.read("qweight", qweight);
    check_words(codes, rows, words, "eight columns a word");
    Tensor scale = call.read("scales", scales).like(to).shape(groups, columns).contiguous_rows();
    Tensor zero = call.read("zeros", zeros);
    check_words(zero, groups, words, "a row for each group, eight columns a word");
    PackedDequantizeArgs args = arguments(to, codes, zero, scale);
    args.packing = Packing::kAwq4;
    args.group_size = equal_groups(scale, rows);
    if (to.numel() == 0) return;
    call.run(stream, args, packed_dequantize_cpu, PYKV_CUDA(packed_dequantize_cuda));
  });
}

pykv_status pykv_gptq_dequantize(DLTensor* out, const DLTensor* qweight, const DLTensor* qzeros, const DLTensor* scales,
                                 const DLTensor* g_idx, int64_t bits, bool use_v2_format, void* stream) {
  using namespace pykv;
  return guarded("gptq_dequantize", [&](Call& call) {
    Dim rows{"num_rows"}, columns{"num_columns"}, groups{"num_groups"};
    Tensor to = call.write("out", out).dtype(kFloats).shape(rows, columns).contiguous_rows().no_overlap_within();
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8)
      fail(PYKV_VALUE_ERROR, "bits: must be 2, 3, 4 or 8, got %" PRId64, bits);
    if (rows * bits % 32 != 0 || columns * bits % 32 != 0)
      to.fail(PYKV_VALUE_ERROR, "rows and columns of %" PRId64 " bits must fill whole words of 32, got shape %s", bits,
              to.shape_string().c_str());
    Dim code_words{"num_rows * bits / 32", rows * bits / 32},
        zero_words{"num_columns * bits / 32", columns * bits / 32};
    Tensor codes = call.read("qweight", qweight);
    check_words(codes, code_words, columns, "num_rows * bits / 32, num_columns");
    Tensor zero = call.read("qzeros", qzeros).dtype({DType::kInt32}).rank(2).dim(0, groups);
    check_words(zero, groups, zero_words, "num_groups, num_columns * bits / 32");
    Tensor scale = call.read("scales", scales).like(to).shape(groups, columns).contiguous_rows();
    PackedDequantizeArgs args = arguments(to, codes, zero, scale);
    args.packing = bits == 2   ? Packing::kGptq2
                   : bits == 3 ? Packing::kGptq3
                   : bits == 4 ? Packing::kGptq4
                               : Packing::kGptq8;
    args.zero_offset = use_v2_format ? 0 : 1;
    if (g_idx && Tensor("g_idx", g_idx).numel() > 0) {
      Tensor group = call.read("g_idx", g_idx).shape(rows);
      args.group_of_row = group.index();
      args.group_size = 1;
    } else {
      args.group_size = equal_groups(scale, rows);
    }
    if (to.numel() == 0) return;
    call.run(stream, args, packed_dequantize_cpu, PYKV_CUDA(packed_dequantize_cuda));
  });
}
