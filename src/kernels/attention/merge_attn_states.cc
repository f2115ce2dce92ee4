#include "attention/merge_attn_states.h"

#include "core/call.h"
#include "pykv/attention.h"

namespace pykv {
namespace {

PartialOutput partial_output(const Tensor& t) { return {t.data(), t.stride(0), t.stride(1)}; }
Lse lse(const Tensor& t) { return {static_cast<float*>(t.data()), t.stride(0), t.stride(1)}; }

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_merge_attn_states(DLTensor* output, const DLTensor* prefix_output, const DLTensor* prefix_lse,
                                   const DLTensor* suffix_output, const DLTensor* suffix_lse, DLTensor* output_lse,
                                   int64_t prefill_tokens_with_context, const DLTensor* output_scale, void* stream) {
  return guarded("merge_attn_states", [&](Call& call) {
    MergeAttnStatesArgs a{};
    Dim tokens{"num_tokens"}, heads{"num_heads"}, head_size{"head_size"};
    Tensor prefix =
        call.read("prefix_output", prefix_output).shape(tokens, heads, head_size).dtype(kFloats).contiguous_rows();
    Tensor suffix =
        call.read("suffix_output", suffix_output).shape(tokens, heads, head_size).like(prefix).contiguous_rows();
    Tensor out = call.write("output", output).shape(tokens, heads, head_size).contiguous_rows().no_overlap_within();
    if (output_scale) {
      out.dtype({DType::kFloat8E4M3, DType::kUInt8});
    } else {
      out.like(prefix);
    }
    a.prefix_lse = lse(call.read("prefix_lse", prefix_lse).shape(heads, tokens).dtype({DType::kFloat32}));
    a.suffix_lse = lse(call.read("suffix_lse", suffix_lse).shape(heads, tokens).dtype({DType::kFloat32}));
    if (output_lse)
      a.output_lse =
          lse(call.write("output_lse", output_lse).shape(heads, tokens).dtype({DType::kFloat32}).no_overlap_within());
    if (prefill_tokens_with_context < -1 || prefill_tokens_with_context > tokens)
      fail(PYKV_VALUE_ERROR, "prefill_tokens_with_context: must lie between 0 and num_tokens = %lld, got %lld",
           static_cast<long long>(tokens), static_cast<long long>(prefill_tokens_with_context));
    if (head_size > INT32_MAX || heads > INT32_MAX)
      prefix.fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 heads, and elements in each, are supported");
    a.dtype = prefix.type();
    a.quantised = output_scale != nullptr;
    call.scale(a.output_scale, "output_scale", output_scale, 1);
    a.output = partial_output(out);
    a.prefix = partial_output(prefix);
    a.suffix = partial_output(suffix);
    a.num_tokens = tokens;
    a.context_tokens = prefill_tokens_with_context < 0 ? int64_t{tokens} : prefill_tokens_with_context;
    a.num_heads = static_cast<int>(heads);
    a.head_size = static_cast<int>(head_size);
    if (tokens == 0 || heads == 0 || head_size == 0) return;
    call.run(stream, a, merge_attn_states_cpu, PYKV_CUDA(merge_attn_states_cuda));
  });
}
