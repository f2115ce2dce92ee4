#include "sampling/apply_penalties.h"

#include "core/call.h"
#include "pykv/sampling.h"
#include "sampling/row_inputs.h"

using namespace pykv;

namespace {

TokenLists token_lists(Call& call, const char* name, const DLTensor* ids, const char* lens_name, const DLTensor* lens,
                       Dim& rows) {
  if (!ids) {
    if (lens) fail(PYKV_VALUE_ERROR, "%s: must be given with %s, and only then", lens_name, name);
    return {};
  }
  Dim width{"length"};
  const Tensor x = call.read(name, ids).shape(rows, width).dtype({DType::kInt32, DType::kInt64}).contiguous_rows();
  if (width >= 1ll << 31) x.fail(PYKV_NOT_IMPLEMENTED, "lists of 2^31 ids are not supported");
  TokenLists lists{x.data(), x.stride(0), width, x.type() == DType::kInt64, {}};
  if (lens) lists.lens = call.read(lens_name, lens).shape(rows).index();
  return lists;
}

}  // namespace

pykv_status pykv_apply_penalties_(DLTensor* logits, const DLTensor* prompt_token_ids, const DLTensor* output_token_ids,
                                  const DLTensor* presence_penalties, const DLTensor* frequency_penalties,
                                  const DLTensor* repetition_penalties, const DLTensor* prompt_lens,
                                  const DLTensor* output_lens, void* stream) {
  return guarded("apply_penalties_", [&](Call& call) {
    Dim rows{"num_rows"}, cols{"vocab_size"};
    PenaltiesArgs a{};
    const Tensor x =
        call.write("logits", logits).shape(rows, cols).dtype(kFloats).contiguous_rows().no_overlap_within();
    if (cols > 1 << 30) x.fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^30 logits are not supported");
    a.prompt = token_lists(call, "prompt_token_ids", prompt_token_ids, "prompt_lens", prompt_lens, rows);
    a.output = token_lists(call, "output_token_ids", output_token_ids, "output_lens", output_lens, rows);
    a.presence = row_numbers(call, "presence_penalties", presence_penalties, rows);
    a.frequency = row_numbers(call, "frequency_penalties", frequency_penalties, rows);
    a.repetition = row_numbers(call, "repetition_penalties", repetition_penalties, rows);
    a.dtype = x.type();
    a.logits = x.data();
    a.logit_stride = x.stride(0);
    a.num_rows = rows;
    a.num_cols = static_cast<int32_t>(cols);
    if (x.numel() == 0) return;
    call.run(stream, a, apply_penalties_cpu, PYKV_CUDA(apply_penalties_cuda));
  });
}
