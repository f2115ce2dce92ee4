#include "activation/gated_activation.h"

#include <cinttypes>
#include <cmath>
#include <cstring>
#include <utility>

#include "activation/activation_inputs.h"
#include "activation/gated_activation_sparse.h"
#include "core/call.h"
#include "pykv/activation.h"

namespace pykv {

GatedActivationArgs gated_args(Call& call, const DLTensor* input, const char* result_name, DLTensor* result,
                               bool quantised) {
  const Tensor x = call.read("input", input).rank_between(1, Tensor::kMaxRank).dtype(kFloats).contiguous_rows();
  if (x.size(-1) % 2 != 0)
    x.fail(PYKV_VALUE_ERROR, "the last dimension holds two halves and must be even, got shape %s",
           x.shape_string().c_str());
  Tensor y = call.write(result_name, result).rank(x.ndim());
  if (quantised) {
    y.dtype({DType::kFloat8E4M3, DType::kUInt8, DType::kInt8});
  } else {
    y.like(x);
  }
  for (int i = 0; i < x.ndim() - 1; ++i)
    if (y.size(i) != x.size(i))
      y.fail(PYKV_VALUE_ERROR, "dimension %d must be that of input, %" PRId64 ", got shape %s", i, x.size(i),
             y.shape_string().c_str());
  Dim width("width", x.size(-1) / 2);
  y.last_dim(width).contiguous_rows().no_overlap_within();
  return {
      .dtype = x.type(),
      .result_dtype = y.type() == DType::kUInt8 ? DType::kFloat8E4M3 : y.type(),
      .result = y.data(),
      .input = x.data(),
      .result_rows = y.rows(),
      .input_rows = x.rows(),
      .num_rows = x.numel() == 0 ? 0 : x.numel() / x.size(-1),
      .width = width,
      .gate = 0,
      .up = width,
      .alpha = 1.0f,
      .beta = 0.0f,
      .limit = 0.0f,
      .scale = {},
      .mask = {},
  };
}

void not_in_place(const GatedActivationArgs& args) {
  if (args.num_rows != 0 && args.result == args.input) fail(PYKV_VALUE_ERROR, "out: must not share memory with input");
}

namespace {

using GatedTwin = Twin<GatedActivationArgs>;

// All entries: `change` turns the args of plain halves into those of the op.
template <class Change>
pykv_status gate(const char* op, const char* result_name, DLTensor* result, const DLTensor* input, void* stream,
                 GatedTwin cpu, GatedTwin cuda, Change change) {
  return guarded(op, [&](Call& call) {
    GatedActivationArgs args = gated_args(call, input, result_name, result);
    change(args);
    if (args.num_rows == 0) return;
    call.run(stream, args, cpu, cuda);
  });
}
constexpr auto kAsItIs = [](GatedActivationArgs&) {};

// The number below which a normal variable lies with probability p, 0 < p < 1.  Newton's method towards the left tail,
// where erfc keeps its digits; coming from 0, it does not overshoot.
double normal_quantile(double p) {
  if (p > 0.5) return -normal_quantile(1.0 - p);
  double x = 0.0;
  for (int i = 0; i < 1000; ++i) {
    const double step = (0.5 * std::erfc(-x / std::sqrt(2.0)) - p) * std::sqrt(2.0 * M_PI) * std::exp(0.5 * x * x);
    x -= step;
    if (std::fabs(step) <= 1e-15 * std::fabs(x)) break;
  }
  return x;
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_silu_and_mul(DLTensor* result, const DLTensor* input, void* stream) {
  return gate("silu_and_mul", "result", result, input, stream, silu_and_mul_cpu, PYKV_CUDA(silu_and_mul_cuda), kAsItIs);
}

pykv_status pykv_silu_and_mul_quant(DLTensor* result, const DLTensor* input, const DLTensor* scale, void* stream) {
  return guarded("silu_and_mul_quant", [&](Call& call) {
    GatedActivationArgs args = gated_args(call, input, "result", result, true);
    args.scale = call.parameter("scale", scale);
    if (args.num_rows == 0) return;
    call.run(stream, args, silu_and_mul_quant_cpu, PYKV_CUDA(silu_and_mul_quant_cuda));
  });
}

pykv_status pykv_mul_and_silu(DLTensor* out, const DLTensor* input, void* stream) {
  return gate("mul_and_silu", "out", out, input, stream, silu_and_mul_cpu, PYKV_CUDA(silu_and_mul_cuda),
              [](GatedActivationArgs& args) { std::swap(args.gate, args.up); });
}

pykv_status pykv_silu_and_mul_with_clamp(DLTensor* result, const DLTensor* input, double limit, double alpha,
                                         double beta, void* stream) {
  return gate("silu_and_mul_with_clamp", "result", result, input, stream, silu_and_mul_with_clamp_cpu,
              PYKV_CUDA(silu_and_mul_with_clamp_cuda), [=](GatedActivationArgs& args) {
                args.limit = number_or_infinity("limit", limit);
                args.alpha = number("alpha", alpha);
                args.beta = number("beta", beta);
              });
}

pykv_status pykv_gelu_and_mul(DLTensor* out, const DLTensor* input, void* stream) {
  return gate("gelu_and_mul", "out", out, input, stream, gelu_and_mul_cpu, PYKV_CUDA(gelu_and_mul_cuda), kAsItIs);
}

pykv_status pykv_gelu_tanh_and_mul(DLTensor* out, const DLTensor* input, void* stream) {
  return gate("gelu_tanh_and_mul", "out", out, input, stream, gelu_tanh_and_mul_cpu, PYKV_CUDA(gelu_tanh_and_mul_cuda),
              kAsItIs);
}

pykv_status pykv_fatrelu_and_mul(DLTensor* out, const DLTensor* input, double threshold, void* stream) {
  return gate("fatrelu_and_mul", "out", out, input, stream, fatrelu_and_mul_cpu, PYKV_CUDA(fatrelu_and_mul_cuda),
              [=](GatedActivationArgs& args) { args.limit = number_or_infinity("threshold", threshold); });
}

pykv_status pykv_swigluoai_and_mul(DLTensor* out, const DLTensor* input, double alpha, double limit, void* stream) {
  return gate("swigluoai_and_mul", "out", out, input, stream, swigluoai_and_mul_cpu, PYKV_CUDA(swigluoai_and_mul_cuda),
              [=](GatedActivationArgs& args) {
                not_in_place(args);
                args.alpha = number("alpha", alpha);
                args.limit = number_or_infinity("limit", limit);
              });
}

pykv_status pykv_swiglustep_and_mul(DLTensor* out, const DLTensor* input, double limit, void* stream) {
  return gate("swiglustep_and_mul", "out", out, input, stream, swiglustep_and_mul_cpu,
              PYKV_CUDA(swiglustep_and_mul_cuda),
              [=](GatedActivationArgs& args) { args.limit = number_or_infinity("limit", limit); });
}

pykv_status pykv_situ_and_mul(DLTensor* out, const DLTensor* input, double beta, double linear_beta, void* stream) {
  return gate("situ_and_mul", "out", out, input, stream, situ_and_mul_cpu, PYKV_CUDA(situ_and_mul_cuda),
              [=](GatedActivationArgs& args) {
                args.beta = number("beta", beta);
                args.limit = number("linear_beta", linear_beta);
              });
}

pykv_status pykv_gelu_and_mul_sparse(DLTensor* out, const DLTensor* input, double activation_sparsity,
                                     const char* approximate, void* stream) {
  return guarded("gelu_and_mul_sparse", [&](Call& call) {
    const GatedActivationArgs args = gated_args(call, input, "out", out);
    if (!(activation_sparsity > 0.0 && activation_sparsity < 1.0))
      fail(PYKV_VALUE_ERROR, "activation_sparsity: must lie between 0 and 1, both excluded, got %g",
           activation_sparsity);
    const bool tanh = std::strcmp(required("approximate", approximate), "tanh") == 0;
    if (!tanh && std::strcmp(approximate, "none") != 0)
      fail(PYKV_VALUE_ERROR, "approximate: must be 'none' or 'tanh', got '%s'", approximate);
    if (args.num_rows == 0) return;
    call.run(stream,
             GatedActivationSparseArgs{
                 .dtype = args.dtype,
                 .out = args.result,
                 .input = args.input,
                 .out_rows = args.result_rows,
                 .input_rows = args.input_rows,
                 .num_rows = args.num_rows,
                 .width = args.width,
                 .deviations = static_cast<float>(normal_quantile(activation_sparsity)),
                 .tanh = tanh,
             },
             gated_activation_sparse_cpu, PYKV_CUDA(gated_activation_sparse_cuda));
  });
}
