// What the ops of this family check alike.
#pragma once

#include <cinttypes>

#include "core/call.h"
#include "core/codes.h"

namespace pykv {

inline constexpr std::initializer_list<DType> kFp8Codes = {DType::kFloat8E4M3, DType::kUInt8, DType::kFloat8E5M2};

// Numbers and their codes, row by row.
struct CodeRows {
  Dim width{"width"};
  Tensor input, codes;
  int64_t rows = 1;

  CodeRows(Call& call, const char* codes_name, DLTensor* codes_given, const DLTensor* input_given,
           std::initializer_list<DType> code_types)
      : input(call.read("input", input_given)), codes(call.write(codes_name, codes_given)) {
    input.rank_between(1, Tensor::kMaxRank).dtype(kFloats).last_dim(width).contiguous_rows();
    codes.dtype(code_types).same_shape(input).contiguous_rows().no_overlap_within().apart_from(input);
    for (int i = 0; i < input.ndim() - 1; ++i) rows *= input.size(i);
  }
  bool empty() const { return input.numel() == 0; }
  CodeKind kind() const {
    return codes.type() == DType::kInt8         ? CodeKind::kInt8
           : codes.type() == DType::kFloat8E5M2 ? CodeKind::kE5M2
                                                : CodeKind::kE4M3;
  }
};

// One number for each row, [rows] or [rows, 1].
inline Tensor row_numbers(Call& call, const char* name, DLTensor* given, int64_t rows, DType dtype) {
  Dim num_rows{"num_rows", rows}, one{"1", 1};
  Tensor t = call.write(name, given).rank_between(1, 2).dtype({dtype}).dim(0, num_rows).no_overlap_within();
  if (t.ndim() == 2) t.dim(1, one);
  return t;
}

// Of one element, on the device of the call.
inline void* single(Call& call, const char* name, const DLTensor* given, DType dtype) {
  Tensor t = call.read(name, given).dtype({dtype});
  if (t.numel() != 1) t.fail(PYKV_VALUE_ERROR, "must have 1 element, got shape %s", t.shape_string().c_str());
  return t.data();
}

}  // namespace pykv
