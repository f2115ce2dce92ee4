#include "norm/rms_norm.h"

#include "pykv/norm.h"

namespace pykv {
namespace {

// [hidden_size], or [size of input's first dimension, hidden_size].
RowWeights weights_of_rows(Call& call, const DLTensor* t, const Tensor& input, Dim& hidden_size) {
  if (!t || t->ndim != 2 || input.ndim() < 2) return row_weights(call, "weight", t, input, hidden_size);
  Dim first{"dimension 0 of input", input.size(0)};
  Tensor w = call.read("weight", t).shape(first, hidden_size);
  if (w.type() != DType::kFloat32) w.like(input);
  w.contiguous_rows();
  RowWeights weights{w.data(), w.type() == DType::kFloat32};
  if (first > 1 && hidden_size > 0) {
    weights.stride = w.stride(0);
    weights.rows = input.numel() / (first * hidden_size);
  }
  return weights;
}

// In place: input becomes the norm of its sum with residual.
void norm(Call& call, bool in_place, DLTensor* out, const DLTensor* input, DLTensor* residual, const DLTensor* weight,
          double epsilon, bool gemma, void* stream) {
  Dim hidden_size{"hidden_size"};
  Tensor x = norm_input(call, input, hidden_size);
  const Tensor y = in_place ? x.no_overlap_within() : norm_output(call, "out", out, x);
  RmsNormArgs args{};
  if (in_place) {
    set_residual(args, norm_residual(call, residual, x, y));
    args.rounds_last = gemma && x.type() != DType::kFloat32;
  }
  if (gemma && !weight) fail(PYKV_TYPE_ERROR, "weight: an array is required, got None");
  const bool of_rows = !in_place && !gemma;
  set_rows(
      args, x, y,
      of_rows ? weights_of_rows(call, weight, x, hidden_size) : row_weights(call, "weight", weight, x, hidden_size),
      epsilon);
  args.weight_offset = gemma ? 1.0f : -0.0f;  // which leaves a weight of -0 as it is
  if (args.num_rows == 0) return;
  call.run(stream, args, rms_norm_cpu, PYKV_CUDA(rms_norm_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_rms_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, double epsilon, void* stream) {
  return guarded("rms_norm",
                 [&](Call& call) { norm(call, false, out, input, nullptr, weight, epsilon, false, stream); });
}

pykv_status pykv_fused_add_rms_norm(DLTensor* input, DLTensor* residual, const DLTensor* weight, double epsilon,
                                    void* stream) {
  return guarded("fused_add_rms_norm",
                 [&](Call& call) { norm(call, true, nullptr, input, residual, weight, epsilon, false, stream); });
}

pykv_status pykv_gemma_rms_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, double epsilon,
                                void* stream) {
  return guarded("gemma_rms_norm",
                 [&](Call& call) { norm(call, false, out, input, nullptr, weight, epsilon, true, stream); });
}

pykv_status pykv_gemma_fused_add_rms_norm(DLTensor* input, DLTensor* residual, const DLTensor* weight, double epsilon,
                                          void* stream) {
  return guarded("gemma_fused_add_rms_norm",
                 [&](Call& call) { norm(call, true, nullptr, input, residual, weight, epsilon, true, stream); });
}
