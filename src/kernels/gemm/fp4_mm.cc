#include "gemm/fp4_mm.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/gemm.h"

namespace pykv {
namespace {

const uint8_t* tiled_scales(Call& call, const char* name, const DLTensor* t, int64_t rows, int64_t groups) {
  Tensor s = call.read(name, t).dtype({DType::kFloat8E4M3, DType::kUInt8}).contiguous();
  const int64_t wanted = (rows + 127) / 128 * 128 * ((groups + 3) / 4 * 4);
  if (s.numel() != wanted)
    s.fail(PYKV_VALUE_ERROR,
           "must have %" PRId64 " elements (%" PRId64 " rows and %" PRId64
           " groups of 16, rounded up to multiples of 128 and of 4), got shape %s",
           wanted, rows, groups, s.shape_string().c_str());
  return static_cast<const uint8_t*>(s.data());
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_cutlass_scaled_fp4_mm(DLTensor* out, const DLTensor* a, const DLTensor* b,
                                       const DLTensor* block_scale_a, const DLTensor* block_scale_b,
                                       const DLTensor* alpha, void* stream) {
  return guarded("cutlass_scaled_fp4_mm", [&](Call& call) {
    Fp4MmArgs args{};
    Dim m{"num_rows"}, n{"n"}, bytes{"k / 2"};
    const Tensor rows = call.read("a", a).dtype({DType::kUInt8}).shape(m, bytes);
    const Tensor columns = call.read("b", b).dtype({DType::kUInt8}).shape(n, bytes);
    const Tensor to = call.write("out", out).dtype(kFloats).shape(m, n).contiguous_rows().no_overlap_within();
    if (bytes % 8 != 0)
      rows.fail(PYKV_VALUE_ERROR,
                "dimension 1 must be a multiple of 8, half of 16 elements that share a scale, got %" PRId64,
                int64_t{bytes});
    args.out_dtype = to.type();
    args.a = static_cast<const uint8_t*>(rows.data());
    args.b = static_cast<const uint8_t*>(columns.data());
    args.out = to.data();
    args.m = m;
    args.n = n;
    args.k = 2 * bytes;
    args.a_scales = tiled_scales(call, "block_scale_a", block_scale_a, m, args.k / 16);
    args.b_scales = tiled_scales(call, "block_scale_b", block_scale_b, n, args.k / 16);
    args.a_stride = rows.stride(0);
    args.b_stride = columns.stride(0);
    args.a_step = rows.stride(1);
    args.b_step = columns.stride(1);
    args.out_stride = to.stride(0);
    args.alpha = call.parameter("alpha", alpha);
    if (args.m == 0 || args.n == 0) return;
    call.run(stream, args, fp4_mm_cpu, PYKV_CUDA(fp4_mm_cuda));
  });
}
