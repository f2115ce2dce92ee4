#include "sampling/sample.h"

#include "core/call.h"
#include "pykv/sampling.h"
#include "sampling/row_inputs.h"

using namespace pykv;

namespace {

RowBits bits(Call& call, const char* name, const DLTensor* t, Dim& rows, const Dim& cols) {
  if (!t) return {};
  Dim words{"vocab_size / 32, rounded up", (cols + 31) / 32};
  const Tensor x = call.read(name, t).shape(rows, words).dtype({DType::kInt32}).contiguous_rows();
  return {static_cast<const uint32_t*>(x.data()), x.stride(0)};
}

float* results(Call& call, const char* name, DLTensor* t, Dim& rows, int64_t& stride) {
  if (!t) return nullptr;
  const Tensor x = call.write(name, t).shape(rows).dtype({DType::kFloat32}).no_overlap_within();
  stride = x.stride(0);
  return static_cast<float*>(x.data());
}

}  // namespace

pykv_status pykv_sample(DLTensor* out, const DLTensor* logits, const DLTensor* seeds, const DLTensor* steps,
                        const DLTensor* temperature, const DLTensor* top_k, const DLTensor* top_p,
                        const DLTensor* min_p, const DLTensor* repetition_penalty, const DLTensor* frequency_penalty,
                        const DLTensor* presence_penalty, const DLTensor* prompt_bitmap, const DLTensor* output_counts,
                        const DLTensor* logit_bias, const DLTensor* allowed_bitmap, int64_t first_token,
                        DLTensor* logprobs, DLTensor* scores, void* stream) {
  return guarded("sample", [&](Call& call) {
    Dim rows{"num_rows"}, cols{"vocab_size"};
    SampleArgs a{};
    const Tensor x = call.read("logits", logits).shape(rows, cols).dtype(kFloats).contiguous_rows();
    const Tensor y = call.write("out", out).shape(rows).dtype({DType::kInt32, DType::kInt64}).no_overlap_within();
    if (cols < 1 || cols > kMostTokens)
      x.fail(cols < 1 ? PYKV_VALUE_ERROR : PYKV_NOT_IMPLEMENTED, "vocab_size must lie between 1 and 2^23, got shape %s",
             x.shape_string().c_str());
    if (first_token < 0 || first_token > INT32_MAX - cols)
      fail(PYKV_VALUE_ERROR, "first_token: must lie between 0 and 2^31 - 1 - vocab_size, got %lld",
           static_cast<long long>(first_token));
    if (seeds) a.seeds = call.read("seeds", seeds).shape(rows).index();
    if (steps) a.steps = call.read("steps", steps).shape(rows).index();
    a.temperature = row_numbers(call, "temperature", temperature, rows);
    a.top_k = row_counts(call, "top_k", top_k, rows);
    a.top_p = row_numbers(call, "top_p", top_p, rows);
    a.min_p = row_numbers(call, "min_p", min_p, rows);
    TokenAdjustments& adjust = a.adjustments;
    adjust.repetition = row_numbers(call, "repetition_penalty", repetition_penalty, rows);
    adjust.frequency = row_numbers(call, "frequency_penalty", frequency_penalty, rows);
    adjust.presence = row_numbers(call, "presence_penalty", presence_penalty, rows);
    adjust.prompt = bits(call, "prompt_bitmap", prompt_bitmap, rows, cols);
    adjust.allowed = bits(call, "allowed_bitmap", allowed_bitmap, rows, cols);
    if (output_counts) {
      const Tensor n =
          call.read("output_counts", output_counts).shape(rows, cols).dtype({DType::kInt32}).contiguous_rows();
      adjust.counts = static_cast<const int32_t*>(n.data());
      adjust.count_stride = n.stride(0);
    }
    if (logit_bias) {
      const Tensor bias =
          call.read("logit_bias", logit_bias).shape(rows, cols).dtype({DType::kFloat32}).contiguous_rows();
      adjust.bias = static_cast<const float*>(bias.data());
      adjust.bias_stride = bias.stride(0);
    }
    a.logprobs = results(call, "logprobs", logprobs, rows, a.logprob_stride);
    a.scores = results(call, "scores", scores, rows, a.score_stride);
    a.dtype = x.type();
    a.logits = x.data();
    a.logit_stride = x.stride(0);
    a.out = y.data();
    a.out_stride = y.stride(0);
    a.out_is_int64 = y.type() == DType::kInt64;
    a.num_rows = rows;
    a.num_cols = static_cast<int32_t>(cols);
    a.first_token = static_cast<int32_t>(first_token);
    if (rows == 0) return;
    call.run(stream, a, sample_cpu, PYKV_CUDA(sample_cuda));
  });
}
