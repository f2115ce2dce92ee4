#include "sampling/rejection_sample.h"

#include "core/call.h"
#include "pykv/sampling.h"

using namespace pykv;

pykv_status pykv_rejection_sample(DLTensor* out, const DLTensor* draft_token_ids, const DLTensor* target_probs,
                                  const DLTensor* draft_probs, const DLTensor* draft_lens, const DLTensor* seeds,
                                  const DLTensor* steps, DLTensor* num_accepted, void* stream) {
  return guarded("rejection_sample", [&](Call& call) {
    Dim requests{"num_requests"}, draft{"num_draft"}, vocab{"vocab_size"};
    RejectionSampleArgs a{};
    const Tensor ids = call.read("draft_token_ids", draft_token_ids)
                           .shape(requests, draft)
                           .dtype({DType::kInt32, DType::kInt64})
                           .contiguous_rows();
    Dim positions{"num_draft + 1", draft + 1};
    const Tensor p = call.read("target_probs", target_probs)
                         .shape(requests, positions, vocab)
                         .dtype({DType::kFloat32})
                         .contiguous_rows();
    const Tensor y = call.write("out", out)
                         .shape(requests, positions)
                         .dtype({DType::kInt32, DType::kInt64})
                         .contiguous_rows()
                         .no_overlap_within();
    constexpr int64_t kMost = 1 << 30;
    if (vocab < 1 || vocab > kMost || draft > kMost)
      p.fail(vocab < 1 ? PYKV_VALUE_ERROR : PYKV_NOT_IMPLEMENTED,
             "vocab_size must lie between 1 and 2^30, and num_draft below, got shape %s", p.shape_string().c_str());
    if (draft_probs) {
      const Tensor q = call.read("draft_probs", draft_probs)
                           .shape(requests, draft, vocab)
                           .dtype({DType::kFloat32})
                           .contiguous_rows();
      a.draft = static_cast<const float*>(q.data());
      a.draft_request = q.stride(0);
      a.draft_token = q.stride(1);
    }
    if (draft_lens) a.draft_lens = call.read("draft_lens", draft_lens).shape(requests).index();
    if (seeds) a.seeds = call.read("seeds", seeds).shape(requests).index();
    if (steps) a.steps = call.read("steps", steps).shape(requests).index();
    if (num_accepted) {
      const Tensor n =
          call.write("num_accepted", num_accepted).shape(requests).dtype({DType::kInt32}).no_overlap_within();
      a.num_accepted = static_cast<int32_t*>(n.data());
      a.accepted_stride = n.stride(0);
    }
    a.out = y.data();
    a.out_stride = y.stride(0);
    a.out_is_int64 = y.type() == DType::kInt64;
    a.draft_tokens = ids.data();
    a.draft_token_stride = ids.stride(0);
    a.draft_tokens_are_int64 = ids.type() == DType::kInt64;
    a.target = static_cast<const float*>(p.data());
    a.target_request = p.stride(0);
    a.target_token = p.stride(1);
    a.num_requests = requests;
    a.num_draft = static_cast<int32_t>(draft);
    a.vocab_size = static_cast<int32_t>(vocab);
    if (requests == 0) return;
    call.run(stream, a, rejection_sample_cpu, PYKV_CUDA(rejection_sample_cuda));
  });
}
