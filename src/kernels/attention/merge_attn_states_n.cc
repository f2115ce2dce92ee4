#include "attention/merge_attn_states_n.h"

#include "core/call.h"
#include "pykv/attention.h"

using namespace pykv;

pykv_status pykv_merge_attn_states_n(DLTensor* output, const DLTensor* partial_outputs, const DLTensor* partial_lses,
                                     DLTensor* output_lse, const DLTensor* output_scale, void* stream) {
  return guarded("merge_attn_states_n", [&](Call& call) {
    MergeAttnStatesNArgs a{};
    Dim parts{"num_parts"}, tokens{"num_tokens"}, heads{"num_heads"}, head_size{"head_size"};
    Tensor from = call.read("partial_outputs", partial_outputs)
                      .shape(parts, tokens, heads, head_size)
                      .dtype(kFloats)
                      .contiguous_rows();
    Tensor lses = call.read("partial_lses", partial_lses).shape(parts, heads, tokens).dtype({DType::kFloat32});
    Tensor out = call.write("output", output).shape(tokens, heads, head_size).contiguous_rows().no_overlap_within();
    if (output_scale) {
      out.dtype({DType::kFloat8E4M3, DType::kUInt8});
    } else if (from.type() == DType::kFloat32) {
      out.dtype(kFloats);
    } else {
      out.like(from);
    }
    if (output_lse) {
      const Tensor lse =
          call.write("output_lse", output_lse).shape(heads, tokens).dtype({DType::kFloat32}).no_overlap_within();
      a.output_lse = {static_cast<float*>(lse.data()), lse.stride(0), lse.stride(1)};
    }
    constexpr int64_t kMost = 1 << 30;
    if (parts > kMost || head_size > kMost || heads > kMost)
      from.fail(PYKV_NOT_IMPLEMENTED, "at most 2^30 parts, heads, and elements in each, are supported");
    a.dtype = from.type();
    a.output_dtype = output_scale ? DType::kFloat8E4M3 : out.type();
    a.output = {out.data(), out.stride(0), out.stride(1)};
    a.outputs = {{from.data(), from.stride(1), from.stride(2)}, from.stride(0)};
    a.lses = {{static_cast<float*>(lses.data()), lses.stride(1), lses.stride(2)}, lses.stride(0)};
    call.scale(a.output_scale, "output_scale", output_scale, 1);
    a.num_parts = static_cast<int>(parts);
    a.num_tokens = tokens;
    a.num_heads = static_cast<int>(heads);
    a.head_size = static_cast<int>(head_size);
    if (tokens == 0 || heads == 0 || head_size == 0) return;
    call.run(stream, a, merge_attn_states_n_cpu, PYKV_CUDA(merge_attn_states_n_cuda));
  });
}
