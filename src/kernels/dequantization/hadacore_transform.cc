#include "dequantization/hadacore_transform.h"

#include <bit>
#include <cinttypes>
#include <cmath>

#include "core/call.h"
#include "dequantization/hadamard.h"
#include "pykv/dequantization.h"

namespace pykv {
namespace {

constexpr int64_t kMaxWidth = 49152;  // the kernel holds a row in memory that a block shares

// The factor that is no power of two; 0: there is no matrix.
int32_t order_of(int64_t width) {
  if (std::has_single_bit(static_cast<uint64_t>(width))) return 1;
  for (const int order : kHadamardOrders)
    if (width % order == 0 && std::has_single_bit(static_cast<uint64_t>(width / order))) return order;
  return 0;
}

}  // namespace
}  // namespace pykv

pykv_status pykv_hadacore_transform(DLTensor* out, const DLTensor* x, void* stream) {
  using namespace pykv;
  return guarded("hadacore_transform", [&](Call& call) {
    Tensor to = call.write("out", out).dtype(kFloats).rank_between(1, Tensor::kMaxRank).contiguous_rows();
    to.no_overlap_within();
    Tensor from = call.read("x", x).like(to).same_shape(to).contiguous_rows();
    const int64_t width = to.size(-1);
    if (to.numel() == 0) return;
    const int32_t order = order_of(width);
    if (order == 0)
      from.fail(PYKV_VALUE_ERROR, "the last dimension must be 2^k, or 12, 20, 28 or 40 times that, got %" PRId64,
                width);
    if (width > kMaxWidth)
      from.fail(PYKV_NOT_IMPLEMENTED, "the last dimension must be at most %" PRId64 ", got %" PRId64, kMaxWidth, width);
    const HadacoreTransformArgs args{to.type(),
                                     from.data(),
                                     to.data(),
                                     to.numel() / width,
                                     order,
                                     static_cast<int32_t>(std::countr_zero(static_cast<uint64_t>(width / order))),
                                     static_cast<float>(1 / std::sqrt(static_cast<double>(width))),
                                     from.rows(),
                                     to.rows()};
    call.run(stream, args, hadacore_transform_cpu, PYKV_CUDA(hadacore_transform_cuda));
  });
}
