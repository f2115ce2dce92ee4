#include "sampling/merge_top_k.h"

#include "core/call.h"
#include "pykv/sampling.h"

using namespace pykv;

pykv_status pykv_merge_top_k(DLTensor* indices, const DLTensor* shard_indices, const DLTensor* shard_values, int64_t k,
                             const DLTensor* first_tokens, DLTensor* values, void* stream) {
  return guarded("merge_top_k", [&](Call& call) {
    if (k < 1) fail(PYKV_VALUE_ERROR, "k: must be 1 or more, got %lld", static_cast<long long>(k));
    Dim shards{"num_shards"}, rows{"num_rows"}, n{"n"}, wanted{"k", k};
    MergeTopKArgs a{};
    const Tensor ids =
        call.read("shard_indices", shard_indices).shape(shards, rows, n).dtype({DType::kInt32}).contiguous_rows();
    const Tensor x = call.read("shard_values", shard_values).shape(shards, rows, n).dtype(kFloats).contiguous_rows();
    const Tensor found =
        call.write("indices", indices).shape(rows, wanted).dtype({DType::kInt32}).contiguous_rows().no_overlap_within();
    if (k > INT32_MAX) found.fail(PYKV_NOT_IMPLEMENTED, "2^31 results and more of a row are not supported");
    if (n > 1 << 24 || shards > 1 << 24 || shards * n > 1 << 30)
      ids.fail(PYKV_NOT_IMPLEMENTED, "at most 2^30 entries of a row are supported, got shape %s",
               ids.shape_string().c_str());
    if (values) {
      const Tensor y = call.write("values", values).shape(rows, wanted).like(x).contiguous_rows().no_overlap_within();
      a.values = y.data();
      a.value_stride = y.stride(0);
    }
    if (first_tokens) a.first_tokens = call.read("first_tokens", first_tokens).shape(shards).index();
    a.dtype = x.type();
    a.indices = static_cast<int32_t*>(found.data());
    a.index_stride = found.stride(0);
    a.shard_indices = static_cast<const int32_t*>(ids.data());
    a.shard_values = x.data();
    a.index_shard = ids.stride(0);
    a.index_row = ids.stride(1);
    a.value_shard = x.stride(0);
    a.value_row = x.stride(1);
    a.num_shards = shards;
    a.num_rows = rows;
    a.n = static_cast<int32_t>(n);
    a.k = static_cast<int32_t>(k);
    if (rows == 0) return;
    call.run(stream, a, merge_top_k_cpu, PYKV_CUDA(merge_top_k_cuda));
  });
}
