#include "norm/row_norm.h"

namespace pykv {

Tensor norm_input(Call& call, const DLTensor* input, Dim& hidden_size) {
  return call.read("input", input)
      .rank_between(1, Tensor::kMaxRank)
      .last_dim(hidden_size)
      .dtype(kFloats)
      .contiguous_rows();
}

Tensor norm_output(Call& call, const char* name, DLTensor* out, const Tensor& input) {
  return call.write(name, out).same_shape(input).like(input).contiguous_rows().no_overlap_within();
}

Tensor norm_codes(Call& call, const char* name, DLTensor* result, const Tensor& input,
                  std::initializer_list<DType> dtypes) {
  return call.write(name, result).same_shape(input).dtype(dtypes).contiguous_rows().no_overlap_within();
}

Tensor norm_residual(Call& call, DLTensor* residual, const Tensor& input, const Tensor& out) {
  Tensor z = call.write("residual", residual).same_shape(input).like(input).contiguous_rows().no_overlap_within();
  z.apart_from(input).apart_from(out);
  return z;
}

RowWeights row_weights(Call& call, const char* name, const DLTensor* t, const Tensor& input, Dim& hidden_size) {
  if (!t) return {};
  Tensor w = call.read(name, t).shape(hidden_size);
  if (w.type() != DType::kFloat32) w.like(input);
  w.contiguous();
  return {w.data(), w.type() == DType::kFloat32};
}

void set_rows(RowNormArgs& args, const Tensor& input, const Tensor& out, RowWeights weights, double epsilon) {
  args.dtype = input.type();
  args.out = out.data();
  args.input = input.data();
  args.weights = weights;
  args.out_rows = out.rows();
  args.input_rows = input.rows();
  args.hidden_size = input.size(-1);
  args.num_rows = args.hidden_size == 0 ? 0 : input.numel() / args.hidden_size;
  args.epsilon = number("epsilon", epsilon);
}

void set_residual(RowNormArgs& args, const Tensor& residual) {
  args.residual = residual.data();
  args.residual_rows = residual.rows();
}

}  // namespace pykv
