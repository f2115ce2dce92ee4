#include "norm/rms_norm.h"

#include "core/call.h"
#include "pykv/norm.h"

namespace pykv {
namespace {

const void* weight_of(Call& call, const DLTensor* weight, const Tensor& input, Dim& hidden_size) {
  if (!weight) return nullptr;
  return call.read("weight", weight).shape(hidden_size).like(input).contiguous().data();
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_rms_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, double epsilon, void* stream) {
  return guarded("rms_norm", [&](Call& call) {
    Dim hidden_size{"hidden_size"};
    const Tensor x =
        call.read("input", input).rank_between(2, 4).last_dim(hidden_size).dtype(kFloats).contiguous_rows();
    const Tensor y = call.write("out", out).same_shape(x).like(x).contiguous_rows().no_overlap_within();
    const void* w = weight_of(call, weight, x, hidden_size);
    if (x.numel() == 0) return;
    call.run(stream,
             RmsNormArgs{
                 .dtype = x.type(),
                 .out = y.data(),
                 .input = x.data(),
                 .residual = nullptr,
                 .weight = w,
                 .out_rows = y.rows(),
                 .input_rows = x.rows(),
                 .residual_rows = {},
                 .num_rows = x.numel() / hidden_size,
                 .hidden_size = hidden_size,
                 .epsilon = static_cast<float>(epsilon),
             },
             rms_norm_cpu, PYKV_CUDA(rms_norm_cuda));
  });
}

pykv_status pykv_fused_add_rms_norm(DLTensor* input, DLTensor* residual, const DLTensor* weight, double epsilon,
                                    void* stream) {
  return guarded("fused_add_rms_norm", [&](Call& call) {
    Dim hidden_size{"hidden_size"};
    const Tensor x = call.write("input", input)
                         .rank_between(2, 4)
                         .last_dim(hidden_size)
                         .dtype(kFloats)
                         .contiguous_rows()
                         .no_overlap_within();
    const Tensor z = call.write("residual", residual).same_shape(x).like(x).contiguous_rows().no_overlap_within();
    const void* w = weight_of(call, weight, x, hidden_size);
    if (x.numel() == 0) return;
    if (z.data() == x.data()) z.fail(PYKV_VALUE_ERROR, "must not share memory with input: both are written");
    call.run(stream,
             RmsNormArgs{
                 .dtype = x.type(),
                 .out = x.data(),
                 .input = x.data(),
                 .residual = z.data(),
                 .weight = w,
                 .out_rows = x.rows(),
                 .input_rows = x.rows(),
                 .residual_rows = z.rows(),
                 .num_rows = x.numel() / hidden_size,
                 .hidden_size = hidden_size,
                 .epsilon = static_cast<float>(epsilon),
             },
             rms_norm_cpu, PYKV_CUDA(rms_norm_cuda));
  });
}
