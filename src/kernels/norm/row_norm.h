// What all norms have: rows that are read, what is added to them first, what they are multiplied with, and where they go.
#pragma once

#include "core/args.h"
#include "core/call.h"

namespace pykv {

// One number for each element of a row: the dtype of input, or float32.
struct RowWeights {
  const void* data;  // null: not there
  bool is_float32;
  int64_t stride = 0,
          rows = 1;  // elements from the weights of so many neighbouring rows to those of the next; 0: all one
};

struct RowNormArgs {
  DType dtype;  // of input

  void* out;           // [num_rows, hidden_size]; may be input if of its dtype
  const void* input;   // [num_rows, hidden_size]
  void* residual;      // [num_rows, hidden_size], or null; becomes input + residual, which is what is normed
  RowWeights weights;  // [hidden_size]; not there: ones
  Rows out_rows, input_rows, residual_rows;

  int64_t num_rows, hidden_size;
  float epsilon;
};

// What the C entry points of norms share: checks, and what follows from them.

Tensor norm_input(Call& call, const DLTensor* input, Dim& hidden_size);
Tensor norm_output(Call& call, const char* name, DLTensor* out, const Tensor& input);
Tensor norm_codes(Call& call, const char* name, DLTensor* result, const Tensor& input,
                  std::initializer_list<DType> dtypes);
// residual: memory that is neither that of input nor of what is written.
Tensor norm_residual(Call& call, DLTensor* residual, const Tensor& input, const Tensor& out);
RowWeights row_weights(Call& call, const char* name, const DLTensor* t, const Tensor& input, Dim& hidden_size);

void set_rows(RowNormArgs& args, const Tensor& input, const Tensor& out, RowWeights weights, double epsilon);
void set_residual(RowNormArgs& args, const Tensor& residual);

}  // namespace pykv
