#include "attention/merge_attn_states.h"

#include "core/call.h"
#include "pykv/attention.h"

namespace pykv {
namespace {

// Arrays of one partial attention; `t` may have more dimensions in front.
PartialOutput partial_output(const Tensor& t) { return {t.data(), t.stride(-3), t.stride(-2)}; }
Lse lse(const Tensor& t) { return {static_cast<float*>(t.data()), t.stride(-2), t.stride(-1)}; }

struct Sizes {
  Dim parts{"num_parts"}, tokens{"num_tokens"}, heads{"num_heads"}, head_size{"head_size"};
};

// What both entries have in common: the merged arrays, for parts like `from`, and the launch.
void merge(Call& call, MergeAttnStatesArgs& a, Sizes& sizes, Tensor& from, DLTensor* output, DLTensor* output_lse,
           const DLTensor* output_scale, void* stream) {
  Tensor out = call.write("output", output).shape(sizes.tokens, sizes.heads, sizes.head_size);
  out.contiguous_rows().no_overlap_within();
  if (output_scale) {
    out.dtype({DType::kFloat8E4M3, DType::kUInt8});
    a.output_scale = call.parameter("output_scale", output_scale);
  } else if (!a.copies_empty && from.type() == DType::kFloat32) {
    out.dtype(kFloats);
  } else {
    out.like(from);
  }
  if (output_lse)
    a.output_lse = lse(call.write("output_lse", output_lse)
                           .shape(sizes.heads, sizes.tokens)
                           .dtype({DType::kFloat32})
                           .no_overlap_within());
  constexpr int64_t kMost = 1 << 30;
  if (sizes.parts > kMost || sizes.head_size > kMost || sizes.heads > kMost)
    from.fail(PYKV_NOT_IMPLEMENTED, "at most 2^30 parts, heads, and elements in each, are supported");
  a.dtype = from.type();
  a.output_dtype = output_scale ? DType::kFloat8E4M3 : out.type();
  a.output = partial_output(out);
  a.num_parts = static_cast<int>(sizes.parts);
  a.num_tokens = sizes.tokens;
  a.num_heads = static_cast<int>(sizes.heads);
  a.head_size = static_cast<int>(sizes.head_size);
  if (sizes.tokens == 0 || sizes.heads == 0 || sizes.head_size == 0) return;
  call.run(stream, a, merge_attn_states_cpu, PYKV_CUDA(merge_attn_states_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_merge_attn_states(DLTensor* output, const DLTensor* prefix_output, const DLTensor* prefix_lse,
                                   const DLTensor* suffix_output, const DLTensor* suffix_lse, DLTensor* output_lse,
                                   int64_t prefill_tokens_with_context, const DLTensor* output_scale, void* stream) {
  return guarded("merge_attn_states", [&](Call& call) {
    MergeAttnStatesArgs a{};
    Sizes sizes{.parts{"num_parts", 2}};
    const auto output_of = [&](const char* name, const DLTensor* t) {
      return call.read(name, t).shape(sizes.tokens, sizes.heads, sizes.head_size).contiguous_rows();
    };
    const auto lse_of = [&](const char* name, const DLTensor* t) {
      return lse(call.read(name, t).shape(sizes.heads, sizes.tokens).dtype({DType::kFloat32}));
    };
    Tensor prefix = output_of("prefix_output", prefix_output).dtype(kFloats);
    a.outputs[0] = partial_output(prefix);
    a.outputs[1] = partial_output(output_of("suffix_output", suffix_output).like(prefix));
    a.lses[0] = lse_of("prefix_lse", prefix_lse);
    a.lses[1] = lse_of("suffix_lse", suffix_lse);
    if (prefill_tokens_with_context < -1 || prefill_tokens_with_context > sizes.tokens)
      fail(PYKV_VALUE_ERROR, "prefill_tokens_with_context: must lie between 0 and num_tokens = %lld, got %lld",
           static_cast<long long>(sizes.tokens), static_cast<long long>(prefill_tokens_with_context));
    a.context_tokens = prefill_tokens_with_context < 0 ? int64_t{sizes.tokens} : prefill_tokens_with_context;
    a.copies_empty = true;
    merge(call, a, sizes, prefix, output, output_lse, output_scale, stream);
  });
}

pykv_status pykv_merge_attn_states_n(DLTensor* output, const DLTensor* partial_outputs, const DLTensor* partial_lses,
                                     DLTensor* output_lse, const DLTensor* output_scale, void* stream) {
  return guarded("merge_attn_states_n", [&](Call& call) {
    MergeAttnStatesArgs a{};
    Sizes sizes;
    Tensor from = call.read("partial_outputs", partial_outputs)
                      .shape(sizes.parts, sizes.tokens, sizes.heads, sizes.head_size)
                      .dtype(kFloats)
                      .contiguous_rows();
    const Tensor lses =
        call.read("partial_lses", partial_lses).shape(sizes.parts, sizes.heads, sizes.tokens).dtype({DType::kFloat32});
    a.output_part = from.stride(0);
    a.lse_part = lses.stride(0);
    a.outputs[0] = a.outputs[1] = partial_output(from);
    a.outputs[1].data = static_cast<char*>(from.data()) + a.output_part * static_cast<int64_t>(size_of(from.type()));
    a.lses[0] = a.lses[1] = lse(lses);
    a.lses[1].data += a.lse_part;
    a.context_tokens = sizes.tokens;
    merge(call, a, sizes, from, output, output_lse, output_scale, stream);
  });
}
