#include "sampling/apply_repetition_penalties.h"

#include "core/call.h"
#include "core/known_dtypes.h"
#include "pykv/sampling.h"

using namespace pykv;

pykv_status pykv_apply_repetition_penalties_(DLTensor* logits, const DLTensor* prompt_mask, const DLTensor* output_mask,
                                             const DLTensor* repetition_penalties, void* stream) {
  return guarded("apply_repetition_penalties_", [&](Call& call) {
    Dim rows{"num_rows"}, cols{"vocab_size"};
    RepetitionPenaltiesArgs a{};
    const Tensor x =
        call.write("logits", logits).shape(rows, cols).dtype(kFloats).contiguous_rows().no_overlap_within();
    DLTensor prompt_bytes, output_bytes;
    const Tensor prompt = call.read("prompt_mask", bool_as_bytes(prompt_mask, prompt_bytes))
                              .shape(rows, cols)
                              .dtype({DType::kUInt8})
                              .contiguous_rows();
    const Tensor output = call.read("output_mask", bool_as_bytes(output_mask, output_bytes))
                              .shape(rows, cols)
                              .dtype({DType::kUInt8})
                              .contiguous_rows();
    const Tensor penalties =
        call.read("repetition_penalties", repetition_penalties).shape(rows).dtype({x.type(), DType::kFloat32});
    a.dtype = x.type();
    a.penalty_dtype = penalties.type();
    a.logits = x.data();
    a.prompt_mask = static_cast<const uint8_t*>(prompt.data());
    a.output_mask = static_cast<const uint8_t*>(output.data());
    a.penalties = penalties.data();
    a.logit_stride = x.stride(0);
    a.prompt_stride = prompt.stride(0);
    a.output_stride = output.stride(0);
    a.penalty_stride = penalties.stride(0);
    a.num_rows = rows;
    a.num_cols = cols;
    if (x.numel() == 0) return;
    call.run(stream, a, apply_repetition_penalties_cpu, PYKV_CUDA(apply_repetition_penalties_cuda));
  });
}
