#include "sampling/top_k_per_row.h"

#include "core/call.h"
#include "pykv/sampling.h"

using namespace pykv;

pykv_status pykv_top_k_per_row(DLTensor* indices, const DLTensor* logits, int64_t k, const DLTensor* row_starts,
                               const DLTensor* row_ends, const DLTensor* row_k, int64_t next_n, bool sorted,
                               DLTensor* values, void* stream) {
  return guarded("top_k_per_row", [&](Call& call) {
    constexpr int64_t kMost = 4096;
    if (k < 1 || k > kMost)
      fail(k < 1 ? PYKV_VALUE_ERROR : PYKV_NOT_IMPLEMENTED, "k: must lie between 1 and %lld, got %lld",
           static_cast<long long>(kMost), static_cast<long long>(k));
    Dim rows{"num_rows"}, cols{"num_cols"}, wanted{"k", k};
    TopKPerRowArgs a{};
    const Tensor x = call.read("logits", logits).shape(rows, cols).dtype(kFloats).contiguous_rows();
    const Tensor found =
        call.write("indices", indices).shape(rows, wanted).dtype({DType::kInt32}).contiguous_rows().no_overlap_within();
    if (cols > 1 << 30) x.fail(PYKV_NOT_IMPLEMENTED, "rows of more than 2^30 logits are not supported");
    if (row_starts) a.starts.list = call.read("row_starts", row_starts).shape(rows).index();
    if (next_n < 0 || (next_n > 0 && (rows % next_n != 0 || !row_ends)))
      fail(PYKV_VALUE_ERROR, "next_n: must be 0, or divide num_rows = %lld with row_ends given, got %lld",
           static_cast<long long>(rows), static_cast<long long>(next_n));
    if (row_ends) {
      Tensor ends = call.read("row_ends", row_ends).rank_between(1, 2);
      if (ends.ndim() == 2) ends.contiguous();
      const int64_t count = next_n > 0 ? rows / next_n : int64_t{rows};
      if (ends.numel() != count)
        ends.fail(PYKV_VALUE_ERROR, "must have %lld elements, got shape %s", static_cast<long long>(count),
                  ends.shape_string().c_str());
      a.ends.list = ends.index();
      if (ends.ndim() == 2) a.ends.list.stride = 1;
    }
    if (row_k) a.row_k.list = call.read("row_k", row_k).shape(rows).index();
    if (values) {
      const Tensor y = call.write("values", values).shape(rows, wanted).like(x).contiguous_rows().no_overlap_within();
      a.values = y.data();
      a.value_stride = y.stride(0);
    }
    a.dtype = x.type();
    a.indices = static_cast<int32_t*>(found.data());
    a.logits = x.data();
    a.index_stride = found.stride(0);
    a.logit_stride = x.stride(0);
    a.next_n = next_n;
    a.num_rows = rows;
    a.num_cols = static_cast<int32_t>(cols);
    a.k = static_cast<int32_t>(k);
    a.sorted = sorted;
    if (rows == 0) return;
    call.run(stream, a, top_k_per_row_cpu, PYKV_CUDA(top_k_per_row_cuda));
  });
}
