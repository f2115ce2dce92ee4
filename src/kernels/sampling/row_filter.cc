#include "sampling/row_filter.h"

#include "pykv/sampling.h"
#include "sampling/row_inputs.h"

namespace pykv {
namespace {

struct Sizes {
  Dim rows{"num_rows"}, cols{"vocab_size"};
};

RowFilterArgs input_of(Call& call, const char* name, const DLTensor* input, Sizes& sizes) {
  RowFilterArgs a{};
  const Tensor x = call.read(name, input).shape(sizes.rows, sizes.cols).dtype(kFloats).contiguous_rows();
  if (sizes.cols > kMostTokens) x.fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^23 elements are not supported");
  a.dtype = x.type();
  a.input = x.data();
  a.input_stride = x.stride(0);
  a.num_rows = sizes.rows;
  a.num_cols = static_cast<int32_t>(sizes.cols);
  return a;
}

void take_out(Call& call, RowFilterArgs& a, DLTensor* out, Sizes& sizes, std::initializer_list<DType> dtypes) {
  const Tensor y =
      call.write("out", out).shape(sizes.rows, sizes.cols).dtype(dtypes).contiguous_rows().no_overlap_within();
  a.out_dtype = y.type();
  a.out = y.data();
  a.out_stride = y.stride(0);
}

void run(Call& call, const RowFilterArgs& a, void* stream) {
  if (a.num_rows == 0 || a.num_cols == 0) return;
  call.run(stream, a, row_filter_cpu, PYKV_CUDA(row_filter_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_softmax(DLTensor* out, const DLTensor* logits, const DLTensor* temperature, void* stream) {
  return guarded("softmax", [&](Call& call) {
    Sizes sizes;
    RowFilterArgs a = input_of(call, "logits", logits, sizes);
    take_out(call, a, out, sizes, {DType::kFloat32, a.dtype});
    a.report = "softmax: logits";
    a.result = RowResult::kProbabilities;
    a.temperature = row_numbers(call, "temperature", temperature, sizes.rows);
    run(call, a, stream);
  });
}

pykv_status pykv_top_k_top_p_mask(DLTensor* out, const DLTensor* logits, const DLTensor* top_k, const DLTensor* top_p,
                                  const DLTensor* min_p, const DLTensor* temperature, void* stream) {
  return guarded("top_k_top_p_mask", [&](Call& call) {
    Sizes sizes;
    RowFilterArgs a = input_of(call, "logits", logits, sizes);
    take_out(call, a, out, sizes, {a.dtype});
    a.report = "top_k_top_p_mask: logits";
    a.result = RowResult::kLogits;
    a.top_k = row_counts(call, "top_k", top_k, sizes.rows);
    a.top_p = row_numbers(call, "top_p", top_p, sizes.rows);
    a.min_p = row_numbers(call, "min_p", min_p, sizes.rows);
    a.temperature = row_numbers(call, "temperature", temperature, sizes.rows);
    run(call, a, stream);
  });
}

pykv_status pykv_top_k_top_p_renorm(DLTensor* out, const DLTensor* probs, const DLTensor* top_k, const DLTensor* top_p,
                                    const DLTensor* min_p, void* stream) {
  return guarded("top_k_top_p_renorm", [&](Call& call) {
    Sizes sizes;
    RowFilterArgs a = input_of(call, "probs", probs, sizes);
    take_out(call, a, out, sizes, {a.dtype});
    a.report = "top_k_top_p_renorm: probs";
    a.result = RowResult::kProbabilities;
    a.of_probabilities = true;
    a.top_k = row_counts(call, "top_k", top_k, sizes.rows);
    a.top_p = row_numbers(call, "top_p", top_p, sizes.rows);
    a.min_p = row_numbers(call, "min_p", min_p, sizes.rows);
    run(call, a, stream);
  });
}

pykv_status pykv_token_logprobs(DLTensor* logprobs, const DLTensor* logits, const DLTensor* token_ids,
                                const DLTensor* temperature, DLTensor* ranks, void* stream) {
  return guarded("token_logprobs", [&](Call& call) {
    Sizes sizes;
    Dim tokens{"num_tokens"};
    RowFilterArgs a = input_of(call, "logits", logits, sizes);
    const Tensor ids = call.read("token_ids", token_ids)
                           .shape(sizes.rows, tokens)
                           .dtype({DType::kInt32, DType::kInt64})
                           .contiguous_rows();
    const Tensor y = call.write("logprobs", logprobs)
                         .shape(sizes.rows, tokens)
                         .dtype({DType::kFloat32})
                         .contiguous_rows()
                         .no_overlap_within();
    if (sizes.cols == 0 && y.numel() > 0) fail(PYKV_VALUE_ERROR, "logits: have no tokens");
    if (ranks) {
      const Tensor r = call.write("ranks", ranks).shape(sizes.rows, tokens).dtype({DType::kInt32}).contiguous_rows();
      a.ranks = static_cast<int32_t*>(r.data());
      a.rank_stride = r.stride(0);
    }
    constexpr int64_t kMostOfRow = 1 << 20;
    if (tokens > kMostOfRow) ids.fail(PYKV_NOT_IMPLEMENTED, "more than 2^20 tokens of a row are not supported");
    a.report = "token_logprobs: logits";
    a.result = RowResult::kTokenLogprobs;
    a.temperature = row_numbers(call, "temperature", temperature, sizes.rows);
    a.tokens = ids.data();
    a.tokens_are_int64 = ids.type() == DType::kInt64;
    a.token_stride = ids.stride(0);
    a.out = y.data();
    a.out_stride = y.stride(0);
    a.num_tokens = static_cast<int32_t>(tokens);
    if (tokens == 0) return;
    run(call, a, stream);
  });
}
