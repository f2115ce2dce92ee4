#include "dequantization/permute_cols.h"

#include "core/call.h"
#include "core/known_dtypes.h"
#include "pykv/dequantization.h"

using namespace pykv;

namespace {

// The known dtype of as many bits, for elements that are copied as they are; others stay what they are.
DLDataType known_of_size(DLDataType t) {
  switch (t.lanes == 1 ? t.bits : 0) {
    case 8:
      return {kDLUInt, 8, 1};
    case 16:
      return {kDLFloat, 16, 1};
    case 32:
      return {kDLInt, 32, 1};
    case 64:
      return {kDLInt, 64, 1};
    default:
      return t;
  }
}

}  // namespace

pykv_status pykv_permute_cols(DLTensor* out, const DLTensor* A, const DLTensor* perm, void* stream) {
  return guarded("permute_cols", [&](Call& call) {
    DLTensor out_as_known, input_as_known;
    if (out && A && key_of(out->dtype) == key_of(A->dtype) && to_dtype(A->dtype) == DType::kOther) {
      const DLDataType unknown = A->dtype, known = known_of_size(unknown);
      A = renamed(A, unknown, known, input_as_known);
      out_as_known = *out;
      out_as_known.dtype = known;
      out = &out_as_known;
    }
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
