#include "sampling/verify_tree.h"

#include "core/call.h"
#include "pykv/sampling.h"

using namespace pykv;

namespace {

NodeIds node_ids(Call& call, const char* name, const DLTensor* t, Dim& requests, Dim& nodes) {
  const Tensor x = call.read(name, t).shape(requests, nodes).dtype({DType::kInt32, DType::kInt64}).contiguous_rows();
  return {x.data(), x.stride(0), x.type() == DType::kInt64};
}

WritableIds written_ids(Call& call, const char* name, DLTensor* t, Dim& requests, Dim& width) {
  const Tensor x = call.write(name, t)
                       .shape(requests, width)
                       .dtype({DType::kInt32, DType::kInt64})
                       .contiguous_rows()
                       .no_overlap_within();
  return {x.data(), x.stride(0), x.type() == DType::kInt64};
}

}  // namespace

pykv_status pykv_verify_tree(DLTensor* out, const DLTensor* draft_token_ids, const DLTensor* next_token,
                             const DLTensor* next_sibling, const DLTensor* target_probs,
                             const DLTensor* target_token_ids, const DLTensor* retrieve_index, const DLTensor* seeds,
                             const DLTensor* steps, DLTensor* accepted_index, DLTensor* num_accepted, void* stream) {
  return guarded("verify_tree", [&](Call& call) {
    Dim requests{"num_requests"}, nodes{"num_nodes"}, width{"num_out"}, vocab{"vocab_size"};
    VerifyTreeArgs a{};
    a.draft_tokens = node_ids(call, "draft_token_ids", draft_token_ids, requests, nodes);
    if (nodes < 1 || nodes > kMostNodes)
      fail(nodes < 1 ? PYKV_VALUE_ERROR : PYKV_NOT_IMPLEMENTED,
           "draft_token_ids: num_nodes must lie between 1, the root, and %d, got %lld", kMostNodes,
           static_cast<long long>(nodes));
    if ((target_probs == nullptr) == (target_token_ids == nullptr))
      fail(PYKV_VALUE_ERROR, "target_probs: either it or target_token_ids must be given");
    if (target_probs) {
      const Tensor p = call.read("target_probs", target_probs)
                           .shape(requests, nodes, vocab)
                           .dtype({DType::kFloat32})
                           .contiguous_rows();
      if (vocab < 1 || vocab > 1 << 30)
        p.fail(vocab < 1 ? PYKV_VALUE_ERROR : PYKV_NOT_IMPLEMENTED,
               "vocab_size must lie between 1 and 2^30, got shape %s", p.shape_string().c_str());
      a.target = static_cast<const float*>(p.data());
      a.target_request = p.stride(0);
      a.target_node = p.stride(1);
      a.vocab_size = static_cast<int32_t>(vocab);
    } else {
      a.target_tokens = node_ids(call, "target_token_ids", target_token_ids, requests, nodes);
    }
    a.next_token = node_ids(call, "next_token", next_token, requests, nodes);
    a.next_sibling = node_ids(call, "next_sibling", next_sibling, requests, nodes);
    if (retrieve_index) a.retrieve_index = node_ids(call, "retrieve_index", retrieve_index, requests, nodes);
    a.out = written_ids(call, "out", out, requests, width);
    if (width < 1 || width > nodes)
      fail(PYKV_VALUE_ERROR, "out: must have 1 to num_nodes = %lld columns, got %lld", static_cast<long long>(nodes),
           static_cast<long long>(width));
    if (accepted_index) a.accepted_index = written_ids(call, "accepted_index", accepted_index, requests, width);
    if (seeds) a.seeds = call.read("seeds", seeds).shape(requests).index();
    if (steps) a.steps = call.read("steps", steps).shape(requests).index();
    if (num_accepted) {
      const Tensor n =
          call.write("num_accepted", num_accepted).shape(requests).dtype({DType::kInt32}).no_overlap_within();
      a.num_accepted = static_cast<int32_t*>(n.data());
      a.accepted_stride = n.stride(0);
    }
    a.num_requests = requests;
    a.num_nodes = static_cast<int32_t>(nodes);
    a.num_out = static_cast<int32_t>(width);
    if (requests == 0) return;
    call.run(stream, a, verify_tree_cpu, PYKV_CUDA(verify_tree_cuda));
  });
}
