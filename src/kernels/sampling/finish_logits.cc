#include "sampling/finish_logits.h"

#include <cinttypes>
#include <cmath>

#include "core/call.h"
#include "pykv/sampling.h"

using namespace pykv;

pykv_status pykv_finish_logits_(DLTensor* logits, int64_t num_org, int64_t num_org_pad, int64_t num_added,
                                double soft_cap, double scale, void* stream) {
  return guarded("finish_logits_", [&](Call& call) {
    Dim rows{"num_rows"}, cols{"num_cols"};
    FinishLogitsArgs a{};
    const Tensor x =
        call.write("logits", logits).shape(rows, cols).dtype(kFloats).contiguous_rows().no_overlap_within();
    if (num_org == -1) num_org = cols;
    if (num_org < 0 || num_org_pad < 0 || num_added < 0 || num_org > cols || num_org_pad > cols - num_org ||
        num_added > cols - num_org - num_org_pad)
      x.fail(PYKV_VALUE_ERROR,
             "must have columns for num_org = %" PRId64 ", num_org_pad = %" PRId64 " and num_added = %" PRId64
             ", each 0 or more, got shape %s",
             num_org, num_org_pad, num_added, x.shape_string().c_str());
    a.soft_cap = static_cast<float>(soft_cap);
    if (!(soft_cap >= 0) || (soft_cap > 0 && a.soft_cap == 0))
      fail(PYKV_VALUE_ERROR, "soft_cap: must be positive in fp32, or 0 for none, got %g", soft_cap);
    if (std::isinf(a.soft_cap)) a.soft_cap = 0;
    a.dtype = x.type();
    a.logits = x.data();
    a.logit_stride = x.stride(0);
    a.first_pad = num_org;
    a.end_of_pad = num_org + num_org_pad;
    a.first_unused = a.end_of_pad + num_added;
    a.scale = number("scale", scale);
    a.num_rows = rows;
    a.num_cols = cols;
    const bool all_are_tokens = num_org_pad == 0 && a.first_unused == cols;
    if (x.numel() == 0 || (all_are_tokens && !a.computes())) return;
    call.run(stream, a, finish_logits_cpu, PYKV_CUDA(finish_logits_cuda));
  });
}
