// What the ops of this family check alike.
#pragma once

#include <cinttypes>

#include "core/call.h"
#include "core/codes.h"

namespace pykv {

inline constexpr std::initializer_list<DType> kFp8Codes = {DType::kFloat8E4M3, DType::kUInt8, DType::kFloat8E5M2};

inline QuantCode kind_of(const Tensor& codes) {
  return codes.type() == DType::kInt8         ? QuantCode::kInt8
         : codes.type() == DType::kFloat8E5M2 ? QuantCode::kE5M2
                                              : QuantCode::kE4M3;
}

// Of all dimensions but the last; those of t must be those of x, and as many.
inline int64_t same_rows(Tensor& t, const Tensor& x) {
  t.rank(x.ndim());
  int64_t rows = 1;
  for (int i = 0; i < x.ndim() - 1; ++i) {
    Dim same{"the input's", x.size(i)};
    t.dim(i, same);
    rows *= x.size(i);
  }
  return rows;
}

// Numbers and a code for each, row by row.  halves: 2 where an activation makes one number of two.
struct CodeRows {
  Tensor input, codes;
  int64_t width, rows;

  CodeRows(Call& call, const char* codes_name, DLTensor* codes_given, const DLTensor* input_given,
           std::initializer_list<DType> code_types, int halves = 1)
      : input(call.read("input", input_given)), codes(call.write(codes_name, codes_given)) {
    input.rank_between(1, Tensor::kMaxRank).dtype(kFloats).contiguous_rows();
    if (input.size(-1) % halves != 0)
      input.fail(PYKV_VALUE_ERROR, "the last dimension holds two halves and must be even, got shape %s",
                 input.shape_string().c_str());
    width = input.size(-1) / halves;
    rows = same_rows(codes, input);
    Dim same{"width", width};
    codes.dtype(code_types).last_dim(same).contiguous_rows().no_overlap_within().apart_from(input);
  }
  bool empty() const { return input.numel() == 0; }
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
