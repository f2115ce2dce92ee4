#include "dequantization/permute_cols.h"

#include "core/call.h"
#include "pykv/dequantization.h"

pykv_status pykv_permute_cols(DLTensor* out, const DLTensor* A, const DLTensor* perm, void* stream) {
  using namespace pykv;
  return guarded("permute_cols", [&](Call& call) {
    Tensor to = call.write("out", out).rank_between(1, Tensor::kMaxRank).no_overlap_within();
    Tensor from = call.read("A", A).like(to).same_shape(to);
    Dim columns{"num_columns", to.size(-1)};
    Tensor order = call.read("perm", perm).shape(columns);
    const int64_t rows = columns > 0 ? to.numel() / columns : 0;
    const PermuteColsArgs args{static_cast<int32_t>(size_of(to.type())),
                               from.data(),
                               to.data(),
                               order.index(),
                               rows,
                               columns,
                               from.rows(),
                               to.rows(),
                               from.stride(-1),
                               to.stride(-1)};
    if (rows == 0) return;
    call.run(stream, args, permute_cols_cpu, PYKV_CUDA(permute_cols_cuda));
  });
}
